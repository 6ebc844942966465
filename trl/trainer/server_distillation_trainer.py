"""On-policy distillation from a teacher behind `vllm serve`."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.functional.divergence import support_divergence
from trl.generation.vllm_teacher import TeacherLogps, connect_teacher
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.distillation import DistillingTrainer
from trl.trainer.distillation_config import ServerDistillationConfig
from trl.trainer.online import Samples
from trl.types import RolloutBatch


class ServerDistillationTrainer(DistillingTrainer):
    """Trains a language model, the student, to predict as a teacher on a server does on what the student writes.

    A server tells the probabilities of few tokens; all others count as one.

    Args:
        model: name or folder of the student, a causal language model, or the model.
        args: the configuration, with `teacher_model_server_url`.
        train_dataset: rows with a `prompt` (text or messages).
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the student when not given.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, NotSupportedError: before a model is loaded where that can be known.
        ServerError: the teacher's server cannot be reached or used.
    """

    args: ServerDistillationConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: ServerDistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        refuse_unsupported(quantization_config=quantization_config, peft_config=peft_config)
        args = args or ServerDistillationConfig(output_dir=default_output_dir(model, "ServerDistillation"))
        super().__init__(
            model,
            args,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def prepare_models(self, policy: PreTrainedModel) -> None:
        """Also connects to the teacher."""
        super().prepare_models(policy)
        args = self.args
        assert args.teacher_model_server_url is not None
        self.teacher = connect_teacher(
            args.teacher_model_server_url,
            top_k=args.loss_top_k,
            api_key=args.vllm_server_api_key,
            timeout=args.vllm_server_timeout,
            request_timeout=args.vllm_request_timeout,
            # Reverse KL looks at the sampled tokens alone, which the student knows.
            vocab_size=None if args.beta == 1.0 else policy.config.get_text_config().vocab_size,
            student_tokens=len(self.processing_class),
            allow_unsupported_version=args.vllm_allow_unsupported_version,
        )
        weakref.finalize(self, self.teacher.close)

    def score(self, batch: RolloutBatch, samples: Samples, mode: Mode) -> dict[str, list[Any]]:
        """Asks the teacher for its distributions at the completions' tokens."""
        told = self.teacher.distributions([(r.prompt_ids, r.completion.token_ids) for r in samples.rollouts])
        ids, logps = support(told, batch.completion_ids.cpu(), self.args.beta)
        batch.teacher_ids, batch.teacher_logps = ids.to(batch.device), logps.to(batch.device)
        return {}

    @property
    def loss_temperature(self) -> float:
        """1: what the teacher tells is not divided by a temperature."""
        return 1.0

    def divergences(self, model: nn.Module, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """The student's divergence from the teacher over the tokens it told, and the student's entropy, both `[T]`."""
        assert batch.teacher_ids is not None
        assert batch.teacher_logps is not None
        out = self.token_logps(model, batch, targets=batch.teacher_ids)
        valid = ~torch.isnan(batch.teacher_logps)
        values = support_divergence(
            out.logps, batch.teacher_logps, self.args.beta, add_tail=self.args.loss_add_tail, valid=valid
        )
        return values, out.entropies


def support(told: TeacherLogps, completion_ids: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The tokens that the divergence compares at each place, and the teacher's log-probs of them, both `[T, K]`.

    Forward KL (`beta` 0) compares where the teacher expects something: at its likeliest tokens. Reverse KL (1) compares
    where the student goes: at the token it sampled. Between them both count, once where they are the same token.

    Args:
        completion_ids: `[T]`.
    """
    if beta == 0.0:
        return told.ids, told.logps
    sampled, logps = completion_ids[:, None], told.token_logps[:, None]
    if beta == 1.0:
        return sampled, logps
    twice = told.ids[:, :1] == sampled
    return (
        torch.cat([told.ids[:, :1], sampled], 1),
        torch.cat([told.logps[:, :1], logps.masked_fill(twice, torch.nan)], 1),
    )
