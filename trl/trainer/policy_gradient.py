"""What the trainers share that reinforce completions by advantages: GRPO and RLOO."""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trl.functional.importance import sampler_correction
from trl.functional.reduce import kl_k3
from trl.models.forward import TokenLogps
from trl.trainer.base import Mode
from trl.trainer.online import Samples
from trl.trainer.policy_gradient_config import PolicyGradientConfig
from trl.trainer.rewarded import RewardedTrainer
from trl.types import RolloutBatch, Sampling


class PolicyGradientTrainer(RewardedTrainer):
    """A `RewardedTrainer` with the sampler correction, the balance loss and the metrics of policy-gradient methods."""

    args: PolicyGradientConfig

    def __init__(self, model: str | PreTrainedModel, args: PolicyGradientConfig, **parts: Any):
        super().__init__(model, args, **parts)
        if self.corrects_sampler:
            _warn_of_truncated_sampling(self.sampling)

    @property
    def reference_moves(self) -> bool:
        """Whether the reference model follows the policy."""
        return self.args.sync_ref_model

    def score(self, batch: RolloutBatch, samples: Samples, mode: Mode) -> dict[str, list[Any]]:
        """Rewards and advantages; completions that were cut off leave the loss here, where they are to."""
        if self.args.mask_truncated_completions:
            assert batch.ended is not None
            batch.loss_mask = batch.loss_mask & batch.ended.to(batch.device)[batch.seq_of_token]
        return super().score(batch, samples, mode)

    def active_sequences(self, batch: RolloutBatch) -> Tensor:
        """Sequences without advantage add nothing, unless a term beside the surrogate does."""
        active = super().active_sequences(batch)
        if self.balance_coef or self.loss_beside_advantages:
            return active
        assert batch.advantages is not None
        return active & (batch.advantages.cpu() != 0)

    @property
    def loss_beside_advantages(self) -> bool:
        """Whether the loss has terms that do not vanish with the advantage."""
        return False

    # ---- log-probs at roll-out time ----

    @property
    def corrects_sampler(self) -> bool:
        """Whether an engine of its own sampled, whose log-probs may differ from the trainer's."""
        return self.engine.own_weights and self.args.vllm_importance_sampling_correction

    @property
    def needs_sampling_logps(self) -> bool:
        """The correction compares them with the trainer's."""
        return self.corrects_sampler

    @property
    def on_policy(self) -> bool:
        """Also off-policy: where the log-probs at roll-out time are needed for something else."""
        return super().on_policy and not self.corrects_sampler

    def finish_slices(self, slices: list[RolloutBatch]) -> None:
        """Adds the sampler correction."""
        if self.corrects_sampler:
            for piece in slices:
                self._add_correction(piece)

    def _add_correction(self, batch: RolloutBatch) -> None:
        args, metrics, mask = self.args, self.metrics["train"], batch.loss_mask
        assert batch.old_logps is not None
        assert batch.sampling_logps is not None
        batch.correction = sampler_correction(
            batch.old_logps,
            batch.sampling_logps,
            mask,
            batch.seq_of_token,
            batch.num_sequences,
            mode=args.vllm_importance_sampling_mode,
            clip_min=args.vllm_importance_sampling_clip_min,
            clip_max=args.vllm_importance_sampling_clip_max,
        )
        difference = (batch.old_logps - batch.sampling_logps)[mask].abs()
        ratio = batch.correction[mask]
        metrics.mean("sampling/sampling_logp_difference/mean", difference)
        metrics.bound("sampling/sampling_logp_difference/max", "max", difference)
        metrics.mean("sampling/importance_sampling_ratio/mean", ratio)
        metrics.bound("sampling/importance_sampling_ratio/min", "min", ratio)
        metrics.bound("sampling/importance_sampling_ratio/max", "max", ratio)

    # ---- metrics ----

    def record_rewards(self, rewards: Tensor, group_std: Tensor, mode: Mode) -> None:
        """Records the rewards of this process's sequences, and how they spread in their groups; both `[N]`."""
        metrics, scored = self.metrics[mode], ~torch.isnan(rewards)
        metrics.mean("reward", rewards)
        metrics.mean("reward_std", group_std[scored])
        metrics.mean("frac_reward_zero_std", (group_std[scored] == 0).double())

    @torch.no_grad()
    def record_tokens(self, out: TokenLogps, batch: RolloutBatch, mode: Mode) -> None:
        """Records entropy and divergence from the reference, as means over the loss tokens."""
        metrics, mask = self.metrics[mode], batch.loss_mask
        counted = mask.sum()
        metrics.ratio("entropy", (out.entropies * mask).sum(), counted)
        if batch.ref_logps is not None:
            metrics.ratio("kl", (kl_k3(out.logps, batch.ref_logps) * mask).sum(), counted)

    @torch.no_grad()
    def record_clipping(self, ratio: Tensor, advantages: Tensor, mode: Mode) -> None:
        """Records the share of ratios at the bounds; minimum and maximum are over the shares of micro-batches.

        Args:
            ratio, advantages: of every loss token, or of every sequence where the ratio is that of sequences.
        """
        metrics, args = self.metrics[mode], self.args
        low = ((ratio < 1 - args.epsilon) & (advantages < 0)).double()
        high = ((ratio > 1 + args.upper_clip) & (advantages > 0)).double()
        for name, hit in (("low_mean", low), ("high_mean", high), ("region_mean", low + high)):
            metrics.mean(f"clip_ratio/{name}", hit)
        # The mean over no token is NaN, which does not count.
        metrics.bound("clip_ratio/low_min", "min", low.mean())
        metrics.bound("clip_ratio/high_max", "max", high.mean())


def _warn_of_truncated_sampling(sampling: Sampling) -> None:
    """The sampler's log-probs are those after truncation, the trainer's of the whole distribution."""
    given = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    if cut := {name: value for name, value in given.items() if value not in (neutral[name], 0.0)}:
        settings = ", ".join(f"`{name}={value}`" for name, value in cut.items())
        warnings.warn(
            f"With {settings} the sampler's probabilities are those of the tokens that were left, the trainer's those "
            "of all: the importance ratio is off by what was cut away. Leave the truncation out, or set "
            "`vllm_importance_sampling_correction=False`.",
            stacklevel=4,
        )
