"""What the distilling trainers share: the student samples, and a divergence from the teacher is minimised."""

from abc import abstractmethod

from torch import Tensor, nn

from trl.functional.reduce import reduce_step_token_mean
from trl.trainer.base import Mode
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.online import OnlineTrainer
from trl.types import RolloutBatch


class DistillingTrainer(OnlineTrainer):
    """An `OnlineTrainer` that brings a student to a teacher on the student's own completions (arXiv:2306.13649)."""

    args: DistillationConfig

    @abstractmethod
    def divergences(self, model: nn.Module, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """The student's divergence from the teacher at every completion token, and its entropy there, both `[T]`."""

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """The mean divergence over the tokens of the optimizer step, on all processes."""
        assert batch.norm is not None
        values, entropies = self.divergences(model, batch)
        self.metrics[mode].ratio("entropy", (entropies.detach() * batch.loss_mask).sum(), batch.loss_mask.sum())
        return reduce_step_token_mean(values, batch.loss_mask, batch.seq_of_token, batch.norm)

    def eval_weight(self, batch: RolloutBatch) -> float:
        """How much the loss of an evaluation batch counts beside others': its loss tokens, on all processes."""
        assert batch.norm is not None
        return batch.norm.tokens
