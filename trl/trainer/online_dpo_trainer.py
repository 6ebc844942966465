"""Online DPO (arXiv:2402.04792): two completions of each prompt, compared by their rewards."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.functional.advantages import rank_pairs, weighted_sum
from trl.functional.preference import Completions, PairOptions, Pairs, ranked_pair_losses
from trl.functional.reduce import segment_sum
from trl.models.forward import TokenLogps
from trl.rewards.scorer import RewardSource
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.rewarded import RewardedTrainer
from trl.types import RolloutBatch


class OnlineDPOTrainer(RewardedTrainer):
    """Trains a language model to prefer the better of two of its own completions, by DPO's loss.

    Args:
        model: name or folder of a causal language model, or the model.
        ref_model: the reference model, by name (loaded as `model` is) or as a model, which is frozen and moved; a copy
            of `model` as it is now when not given.
        reward_funcs: one or a list of: functions, async functions, names of sequence-classification models, modules.
            `args.reward_model_path` adds another one.
        args: the configuration; `OnlineDPOConfig()` with output in `<model name>-OnlineDPO` when not given.
        train_dataset: rows with a `prompt` (text or messages); all further columns reach the reward functions.
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the model when not given.
        reward_processing_classes: tokenizers of the reward models.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, RewardError, NotSupportedError: before a model is loaded where that can be known.
    """

    args: OnlineDPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        reward_funcs: RewardSource | list[RewardSource] | None = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
    ):
        refuse_unsupported(
            data_collator=data_collator,
            peft_config=peft_config,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
        )
        self.given_reference = ref_model
        self._warned_cut = False
        args = args or OnlineDPOConfig(output_dir=default_output_dir(model, "OnlineDPO"))
        super().__init__(
            model,
            args,
            reward_funcs=_all_rewards(reward_funcs, args.reward_model_path),
            reward_processing_classes=reward_processing_classes,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of each row's prompt; of one too long for `max_length`, the end."""
        encoded = super().encode(prompts)
        room = self.args.max_length - self.sampling.max_tokens
        longest = max(map(len, encoded), default=0)
        if longest <= room or room < 1:
            return encoded
        if not self._warned_cut:
            self._warned_cut = True
            warnings.warn(
                f"A prompt of {longest} tokens leaves less than `max_new_tokens` ({self.sampling.max_tokens}) of "
                f"`max_length` ({self.args.max_length}): such prompts lose their beginning. Raise `max_length` to keep "
                "them whole.",
                stacklevel=2,
            )
        return [ids[-room:] for ids in encoded]

    def annotate(self, batch: RolloutBatch, rewards_NF: Tensor, mode: Mode) -> dict[str, list[float]]:
        """Which completion of each pair is the better one: +1, of the other -1, of both 0 where they tie."""
        assert batch.ended is not None
        metrics = self.metrics[mode]
        rewards = self.processes.own(weighted_sum(rewards_NF, self.scorer.weights.cpu()))
        scores = rewards - (self.args.missing_eos_penalty or 0.0) * (~batch.ended).to(rewards)
        first_is_better = rank_pairs(scores.view(-1, 2))
        unknown = torch.isnan(first_is_better)
        preference = torch.stack([first_is_better, -first_is_better], 1).nan_to_num().flatten()
        batch.scores, batch.advantages = scores.to(batch.device), preference.to(batch.device)
        batch.unit_of_seq = torch.arange(len(scores)) // 2
        out_of_loss = unknown.repeat_interleave(2).to(batch.device)
        batch.loss_mask = batch.loss_mask & ~out_of_loss[batch.seq_of_token]
        metrics.mean("reward", rewards)
        metrics.mean("objective/scores", scores)
        metrics.mean("objective/scores_margin", (scores.view(-1, 2)[:, 0] - scores.view(-1, 2)[:, 1]).abs())
        metrics.mean("val/contain_eos_token", batch.ended.double())
        metrics.mean("pairs/tied", (first_is_better[~unknown] == 0).double())
        return {"score": scores.tolist(), "preference": preference.tolist()}

    @property
    def loss_temperature(self) -> float:
        """1: preferences are about the policy itself, however its completions were sampled."""
        return 1.0

    @property
    def beta(self) -> float:
        """`beta` of this epoch."""
        betas = self.args.betas
        return betas[min(int(self.state.epoch or 0), len(betas) - 1)]

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """The loss of each pair, averaged over the pairs of the optimizer step."""
        assert batch.norm is not None
        assert batch.ref_logps is not None
        assert batch.advantages is not None
        out = self.token_logps(model, batch)
        seq_of_token, count = batch.seq_of_token, batch.num_sequences
        log_ratios = segment_sum((out.logps - batch.ref_logps) * batch.loss_mask, seq_of_token, count)
        # The two of a pair have the same number, and only they. Of a pair in the loss, one may be without a token.
        first, second = torch.argsort(batch.units, stable=True).to(batch.device).view(-1, 2).unbind(1)
        in_loss = segment_sum(batch.loss_mask.to(log_ratios), seq_of_token, count) > 0
        in_loss[first] = in_loss[second] = in_loss[first] | in_loss[second]
        # Lengths of one: here IPO, too, is a loss of sums over tokens.
        completions = Completions(log_ratios, torch.ones_like(log_ratios))
        pairs = Pairs(completions.select(first), completions.select(second))
        losses = ranked_pair_losses(self.args.loss_type, pairs, batch.advantages[first], PairOptions(self.beta))
        self._record(out, batch, log_ratios.detach(), in_loss, mode)
        return (losses * in_loss[first]).sum() / (batch.norm.sequences / 2)

    @torch.no_grad()
    def _record(self, out: TokenLogps, batch: RolloutBatch, log_ratios: Tensor, in_loss: Tensor, mode: Mode) -> None:
        metrics, beta, seq_of_token = self.metrics[mode], self.beta, batch.seq_of_token
        assert batch.advantages is not None
        logps = segment_sum(out.logps * batch.loss_mask, seq_of_token, batch.num_sequences)
        metrics.mean("objective/kl", log_ratios[in_loss])
        metrics.mean("objective/entropy", -logps[in_loss])
        metrics.ratio("entropy", (out.entropies * batch.loss_mask).sum(), batch.loss_mask.sum())
        metrics.mean("objective/non_score_reward", -beta * log_ratios[in_loss])
        assert batch.scores is not None
        metrics.mean("objective/rlhf_reward", (batch.scores - beta * log_ratios)[in_loss])
        metrics.mean("beta", beta)
        # In pairs that tie neither is chosen.
        chosen, rejected = (torch.nonzero(in_loss & (batch.advantages == sign)).flatten() for sign in (1, -1))
        order = batch.units.to(batch.device)
        chosen, rejected = chosen[order[chosen].argsort()], rejected[order[rejected].argsort()]
        rewards = beta * log_ratios
        metrics.mean("rewards/chosen", rewards[chosen])
        metrics.mean("rewards/rejected", rewards[rejected])
        metrics.mean("rewards/accuracies", (rewards[chosen] > rewards[rejected]).double())
        metrics.mean("rewards/margins", rewards[chosen] - rewards[rejected])
        metrics.mean("logps/chosen", logps[chosen])
        metrics.mean("logps/rejected", logps[rejected])


def _all_rewards(reward_funcs: Any, reward_model_path: str | None) -> Any:
    """The reward functions, with the reward model that the arguments name."""
    if reward_model_path is None:
        return reward_funcs
    several = isinstance(reward_funcs, (list, tuple))
    given = [] if reward_funcs is None else reward_funcs if several else [reward_funcs]
    return [*given, reward_model_path]
