"""REINFORCE leave-one-out (RLOO, arXiv:2402.14740)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.functional.advantages import leave_one_out, nan_mean_std, weighted_sum
from trl.functional.policy import clipped_surrogate, sequence_ratio
from trl.functional.reduce import of_sequence, sequence_kl_k1
from trl.rewards.scorer import RewardSource
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.policy_gradient import PolicyGradientTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.types import RolloutBatch


class RLOOTrainer(PolicyGradientTrainer):
    """Trains a language model on the rewards of its own completions, each against the mean of its siblings'.

    A completion is one action: its probability ratio, its divergence from the reference, which is taken off the
    reward, and its advantage are those of the whole sequence.

    Args:
        model: name or folder of a causal language model, or the model.
        reward_funcs: one or a list of: functions, async functions, names of sequence-classification models, modules.
        args: the configuration; `RLOOConfig()` with output in `<model name>-RLOO` when not given.
        train_dataset: rows with a `prompt` (text or messages); all further columns reach the reward functions.
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the model when not given.
        reward_processing_classes: tokenizers of the reward models.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, RewardError, NotSupportedError: before a model is loaded where that can be known.
    """

    args: RLOOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardSource | list[RewardSource] | None = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        refuse_unsupported(quantization_config=quantization_config, peft_config=peft_config)
        super().__init__(
            model,
            args or RLOOConfig(output_dir=default_output_dir(model, "RLOO")),
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def annotate(self, batch: RolloutBatch, rewards_NF: Tensor, mode: Mode) -> dict[str, list[float]]:
        """Leave-one-out advantages of the rewards, less their divergence from the reference."""
        args, plan = self.args, self.group_plan
        group_size = plan.group_size if mode == "train" else plan.eval_group_size
        rewards = weighted_sum(rewards_NF.double(), self.scorer.weights.cpu().double())
        clamped = rewards if args.reward_clip_range is None else rewards.clamp(*args.reward_clip_range)
        penalized = clamped
        if args.beta:
            # Both are needed now, for the whole round, rather than slice by slice after it.
            self.add_frozen_logps(batch, old=True)
            assert batch.old_logps is not None
            assert batch.ref_logps is not None
            kl = sequence_kl_k1(
                batch.old_logps, batch.ref_logps, batch.loss_mask, batch.seq_of_token, batch.num_sequences
            )
            penalized = clamped - args.beta * self.processes.gather(kl).cpu().double()
        advantages = self.processes.own(leave_one_out(penalized, group_size, normalize=args.normalize_advantages))
        batch.advantages = advantages.to(batch.device)
        spread = nan_mean_std(rewards.view(-1, group_size), 1)[1].expand(-1, group_size).flatten()
        self.record_rewards(self.processes.own(rewards), self.processes.own(spread), mode)
        return {"advantage": advantages.tolist()}

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """PPO's clipped surrogate with one ratio for each sequence, averaged over sequences, and the balance loss."""
        args, seq_of_token, count = self.args, batch.seq_of_token, batch.num_sequences
        assert batch.norm is not None
        assert batch.advantages is not None
        out = self.forward_logps(model, batch)
        old_logps = out.logps.detach() if batch.old_logps is None else batch.old_logps
        ratio = sequence_ratio(out.logps - old_logps, batch.loss_mask, seq_of_token, count)
        terms = clipped_surrogate(ratio, batch.advantages, args.epsilon, args.upper_clip)
        if batch.correction is not None:
            terms = terms * of_sequence(batch.correction, seq_of_token, count)
        # A sequence that takes no part has the ratio 1 and no gradient; its value would only blur the loss.
        takes_part = torch.zeros_like(terms).index_fill(0, seq_of_token[batch.loss_mask], 1.0)
        self.record_tokens(out, batch, mode)
        self.record_clipping(ratio[takes_part > 0], batch.advantages[takes_part > 0], mode)
        return self.with_balance_loss((terms * takes_part).sum() / batch.norm.sequences, out, batch, mode)
