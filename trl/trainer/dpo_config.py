"""Configuration of `DPOTrainer`."""

import warnings
from dataclasses import dataclass

from trl.errors import ConfigError
from trl.functional.preference import F_DIVERGENCES, PAIR_LOSSES, PairOptions
from trl.trainer.arguments import DPOArguments
from trl.trainer.offline_config import OfflineConfig


@dataclass
class DPOConfig(DPOArguments, OfflineConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `DPOTrainer`: those of `trl.trainer.arguments.DPOArguments` and of `transformers.TrainingArguments`.
    Batch sizes count pairs.

    Raises:
        ConfigError: settings that cannot work together.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        if unknown := [name for name in self.loss_type if name not in PAIR_LOSSES]:
            raise ConfigError(f"`loss_type` must be of {', '.join(PAIR_LOSSES)} (got {unknown[0]!r}).")
        if not self.loss_type or len(set(self.loss_type)) < len(self.loss_type):
            raise ConfigError(f"`loss_type` is one loss, or several different ones (got {self.loss_type}).")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ConfigError(
                f"`loss_weights` has a weight for each of `loss_type` (got {len(self.loss_weights)} and "
                f"{len(self.loss_type)})."
            )
        self._check_choices({"f_divergence_type": tuple(F_DIVERGENCES)})
        if self.beta <= 0.0:
            raise ConfigError(f"`beta` must be above 0 (got {self.beta}).")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"`label_smoothing` is a probability below 1/2 (got {self.label_smoothing}).")
        if self.discopop_tau <= 0.0:
            raise ConfigError(f"`discopop_tau` must be above 0 (got {self.discopop_tau}).")
        if self.ld_alpha is not None and not 0.0 <= self.ld_alpha <= 1.0:
            raise ConfigError(f"`ld_alpha` is a weight from 0 to 1 (got {self.ld_alpha}).")
        self._check_losses()
        if self.sync_ref_model and not self.needs_reference:
            raise ConfigError("`sync_ref_model=True` needs a reference model, and `loss_type='sft'` has none.")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError("`sync_ref_model` moves the reference that `precompute_ref_log_probs` asks once.")
        if self.padding_free:
            warnings.warn("`padding_free` is what is done anyway: leave it out.", stacklevel=3)

    def _check_losses(self) -> None:
        losses = {name: PAIR_LOSSES[name] for name in self.loss_type}
        if "exo_pair" in losses and self.label_smoothing == 0.0:
            raise ConfigError("`loss_type='exo_pair'` needs `label_smoothing` above 0 (got 0), e.g. 1e-3.")
        for name, loss in losses.items():
            if loss.reverse_kl_only and self.f_divergence_type != "reverse_kl":
                raise ConfigError(
                    f"`loss_type={name!r}` knows no other divergence than 'reverse_kl' (got `f_divergence_type="
                    f"{self.f_divergence_type!r}`)."
                )
            if loss.whole_batch and (self.use_weighting or self.max_tokens_per_micro_batch):
                raise ConfigError(
                    f"`loss_type={name!r}` compares the pairs of a batch with one another: leave `use_weighting` and "
                    "`max_tokens_per_micro_batch` out."
                )

    @property
    def pair_options(self) -> PairOptions:
        """The constants of the losses."""
        return PairOptions(**{name: getattr(self, name) for name in PairOptions.__dataclass_fields__})

    @property
    def needs_reference(self) -> bool:
        """The losses compare with a reference model, unless they only imitate."""
        return self.loss_type != ["sft"]
