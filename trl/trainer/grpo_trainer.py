"""Group relative policy optimisation (GRPO, arXiv:2402.03300) and the losses that grew out of it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.functional.advantages import group_relative
from trl.functional.entropy import EntropyController, top_entropy_threshold
from trl.functional.importance import off_policy_keep
from trl.functional.policy import (
    POLICY_LOSSES,
    PolicyOptions,
    PolicyTokens,
    cispo,
    clipped,
    policy_ratio,
    policy_terms,
    vespo,
    vespo_weight,
)
from trl.models.forward import TokenLogps
from trl.rewards.scorer import RewardSource
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.policy_gradient import PolicyGradientTrainer
from trl.types import RolloutBatch


class GRPOTrainer(PolicyGradientTrainer):
    """Trains a language model on the rewards of its own completions, relative to those of the same prompt.

    Args:
        model: name or folder of a causal language model, or the model.
        reward_funcs: one or a list of: functions, async functions, names of sequence-classification models, modules.
        args: the configuration; `GRPOConfig()` with output in `<model name>-GRPO` when not given.
        train_dataset: rows with a `prompt` (text or messages); all further columns reach the reward functions.
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the model when not given.
        reward_processing_classes: tokenizers of the reward models.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, RewardError, NotSupportedError: before a model is loaded where that can be known.
    """

    args: GRPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardSource | list[RewardSource] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ):
        refuse_unsupported(
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        args = args or GRPOConfig(output_dir=default_output_dir(model, "GRPO"))
        super().__init__(
            model,
            args,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.policy_options = PolicyOptions(
            **{name: getattr(args, name) for name in PolicyOptions.__dataclass_fields__}
        )
        self.entropy_controller = EntropyController(
            coef=args.entropy_coef,
            target=args.entropy_target,
            step=args.entropy_coef_delta,
            low=args.entropy_coef_min,
            high=args.entropy_coef_max,
        )
        self._step_entropy = torch.zeros(2, dtype=torch.float64)
        self._step_policy_loss: Tensor | float = 0.0

    def annotate(self, batch: RolloutBatch, rewards_NF: Tensor, mode: Mode) -> dict[str, list[float]]:
        """Group-relative advantages."""
        args, plan = self.args, self.group_plan
        assert not isinstance(args.scale_rewards, bool)  # the config made a word of it
        result = group_relative(
            rewards_NF,
            self.scorer.weights.cpu(),
            plan.group_size if mode == "train" else plan.eval_group_size,
            scale=args.scale_rewards,
            aggregation=args.multi_objective_aggregation,
        )
        advantages, rewards, stds = map(self.processes.own, (result.advantages, result.rewards, result.group_std))
        batch.advantages = advantages.to(batch.device)
        self.record_rewards(rewards, stds, mode)
        return {"advantage": advantages.tolist()}

    def finish_slices(self, slices: list[RolloutBatch]) -> None:
        """Also adds the choice of tokens by entropy."""
        super().finish_slices(slices)
        if self.args.top_entropy_quantile < 1.0:
            self._choose_by_entropy(slices)

    @property
    def loss_beside_advantages(self) -> bool:
        """The KL penalty and the entropy bonus."""
        return bool(self.args.beta or self.args.entropy_coef or self.args.use_adaptive_entropy)

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """The policy loss, the KL penalty, the entropy bonus and the balance loss of a micro-batch."""
        args, norm = self.args, batch.norm
        assert norm is not None
        out = self.forward_logps(model, batch)
        tokens = self._policy_tokens(out, batch)
        keep = self._kept_tokens(out, batch, tokens)
        terms = policy_terms(
            args.loss_type,
            tokens,
            self.policy_options,
            keep=keep,
            ref_logps=batch.ref_logps,
            beta=args.beta,
            bias_corrected_kl=args.use_bias_correction_kl,
        )
        reduce = POLICY_LOSSES[args.loss_type][1]
        loss = policy_loss = reduce(terms, tokens.mask, tokens.seq_of_token, norm)
        if coef := self.active_entropy_coef:
            counted = tokens.mask if keep is None else tokens.mask * keep
            loss = loss - coef * (out.entropies * counted).sum() / max(norm.tokens, 1)
        loss = self.with_balance_loss(loss, out, batch, mode)
        self._record(out, batch, tokens, mode)
        if mode == "train":
            self._step_policy_loss += policy_loss.detach().cpu()
        return loss

    @property
    def active_entropy_coef(self) -> float:
        """The weight of the entropy bonus now."""
        return self.entropy_controller.active_coef if self.args.use_adaptive_entropy else self.args.entropy_coef

    def on_gradients_complete(self) -> None:
        """Records the loss without the entropy bonus, and steers the weight of that."""
        args, metrics = self.args, self.metrics["train"]
        if args.entropy_coef or args.use_adaptive_entropy:
            metrics.mean("policy_loss", self._step_policy_loss)
            metrics.mean("entropy_coef", self.active_entropy_coef)
        if args.use_adaptive_entropy:
            total, count = self.processes.total(self._step_entropy).tolist()
            if count:
                self.entropy_controller.update(total / count)
        self._step_entropy.zero_()
        self._step_policy_loss = 0.0

    def extra_state(self) -> dict[str, Any]:
        """Also the entropy controller."""
        return {**super().extra_state(), "entropy_controller": self.entropy_controller.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Also the entropy controller."""
        super().load_extra_state(state)
        self.entropy_controller.load_state_dict(state["entropy_controller"])

    def _policy_tokens(self, out: TokenLogps, batch: RolloutBatch) -> PolicyTokens:
        assert batch.advantages is not None
        seq_of_token = batch.seq_of_token
        old_logps = out.logps.detach() if batch.old_logps is None else batch.old_logps
        log_ratio = out.logps - old_logps
        level = self.args.importance_sampling_level
        return PolicyTokens(
            logps=out.logps,
            ratio=policy_ratio(log_ratio, batch.loss_mask, seq_of_token, batch.num_sequences, level),
            log_ratio=log_ratio,
            advantages=batch.advantages[seq_of_token],
            mask=batch.loss_mask.to(out.logps.dtype),
            seq_of_token=seq_of_token,
            num_sequences=batch.num_sequences,
            correction=batch.correction,
        )

    def _kept_tokens(self, out: TokenLogps, batch: RolloutBatch, tokens: PolicyTokens) -> Tensor | None:
        """`[T]` tokens whose surrogate counts, or None for all."""
        keep = None
        assert batch.advantages is not None
        if self.args.off_policy_mask_threshold is not None:
            behavior = batch.sampling_logps if self.corrects_sampler else batch.old_logps
            keep = off_policy_keep(
                out.logps,
                out.logps.detach() if behavior is None else behavior,
                batch.advantages,
                batch.loss_mask,
                tokens.seq_of_token,
                self.args.off_policy_mask_threshold,
            )[tokens.seq_of_token]
        if batch.in_top_entropy is not None:
            keep = batch.in_top_entropy if keep is None else keep & batch.in_top_entropy
        return keep

    def _choose_by_entropy(self, slices: list[RolloutBatch]) -> None:
        """Marks the tokens of highest entropy among those of all processes; no cut into micro-batches matters."""
        entropies = [self.frozen_logps(self.model, piece).entropies for piece in slices]
        counted = torch.cat([e[piece.loss_mask] for e, piece in zip(entropies, slices, strict=True)])
        threshold = top_entropy_threshold(self.processes.gather_ragged(counted), self.args.top_entropy_quantile)
        for piece, entropy in zip(slices, entropies, strict=True):
            piece.in_top_entropy = entropy >= threshold

    @torch.no_grad()
    def _record(self, out: TokenLogps, batch: RolloutBatch, tokens: PolicyTokens, mode: Mode) -> None:
        metrics, mask = self.metrics[mode], batch.loss_mask
        self.record_tokens(out, batch, mode)
        if mode == "train":
            self._step_entropy += torch.stack([(out.entropies * mask).sum(), mask.sum()]).double().cpu()
        surrogate = POLICY_LOSSES[self.args.loss_type][0]
        if surrogate is clipped:
            self.record_clipping(tokens.ratio[mask], tokens.advantages[mask], mode)
        elif surrogate is cispo:
            capped = (tokens.ratio > self.policy_options.high) & (tokens.advantages > 0)
            metrics.mean("cispo_clip_ratio", capped[mask].double())
        elif surrogate is vespo:
            metrics.mean("vespo/phi_seq_mean", vespo_weight(tokens, self.policy_options))
