"""On-policy distillation from a teacher in the same process."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.errors import ConfigError, GenerationError
from trl.models.forward import supports_packing, token_divergences
from trl.models.load import check_same_tokens, load_policy
from trl.models.reference import frozen
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.distillation import DistillingTrainer
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.online import Samples
from trl.types import RolloutBatch


class DistillationTrainer(DistillingTrainer):
    """Trains a language model, the student, to predict as a teacher does on what the student writes.

    Args:
        model: name or folder of the student, a causal language model, or the model.
        teacher_model: name, folder or model of the teacher, with the student's tokens; a model is frozen and moved.
            `args.teacher_model_name_or_path` when not given.
        args: the configuration; `DistillationConfig()` with output in `<model name>-Distillation` when not given.
        train_dataset: rows with a `prompt` (text or messages).
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the student when not given.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, NotSupportedError: before a model is loaded where that can be known.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        teacher_model: str | PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
    ):
        refuse_unsupported(quantization_config=quantization_config, peft_config=peft_config, tools=tools)
        args = args or DistillationConfig(output_dir=default_output_dir(model, "Distillation"))
        self._given_teacher = _given_teacher(teacher_model, model, args)
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
        """Also loads and places the teacher."""
        super().prepare_models(policy)
        teacher = self._given_teacher
        if isinstance(teacher, str):
            teacher = load_policy(teacher, self.args.teacher_loading, self.args.trust_remote_code)
        check_same_tokens(policy, self.processing_class, teacher, trust_remote_code=self.args.trust_remote_code)
        self.teacher_model = frozen(teacher).to(self.accelerator.device)
        self.teacher_packed = supports_packing(self.teacher_model)

    def score(self, batch: RolloutBatch, samples: Samples, mode: Mode) -> dict[str, list[Any]]:
        """Nothing to score; makes sure that the teacher can read the completions.

        Raises:
            GenerationError: the student wrote one of the ids that only pad its vocabulary, and the teacher has fewer.
        """
        known = self.teacher_model.config.get_text_config().vocab_size
        if batch.num_tokens and (last := int(batch.completion_ids.max())) >= known:
            raise GenerationError(
                f"The student wrote token {last}, and the teacher has {known} tokens: leave such ids out by "
                "`generation_kwargs={'suppress_tokens': [...]}`, or choose a teacher of the same vocabulary size."
            )
        return {}

    @property
    def frozen_models(self) -> list[PreTrainedModel]:
        """The teacher."""
        return [self.teacher_model]

    def divergences(self, model: nn.Module, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """The student's divergence from the teacher over the whole vocabulary, and its entropy, both `[T]`."""
        return token_divergences(
            model,
            self.teacher_model,
            batch,
            self.args.beta,
            temperature=self.loss_temperature,
            packed=self.packed,
            teacher_packed=self.teacher_packed,
            fp32_head=self.args.cast_lm_head_to_fp32,
        )


def _given_teacher(
    teacher_model: str | PreTrainedModel | None, model: str | PreTrainedModel, args: DistillationConfig
) -> str | PreTrainedModel:
    """The teacher, by name or as a model."""
    if teacher_model is not None and args.teacher_model_name_or_path is not None:
        raise ConfigError("The teacher is given twice, by `teacher_model` and `teacher_model_name_or_path`: leave one.")
    teacher = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    if teacher is None:
        raise ConfigError("There is no teacher: pass `teacher_model`, or set `teacher_model_name_or_path`.")
    if not isinstance(teacher, str):
        if teacher is model:
            raise ConfigError("`teacher_model` is the model that is trained: it would follow every step. Pass a copy.")
        for name in ("teacher_model_init_kwargs", "teacher_model_revision"):
            if getattr(args, name):
                raise ConfigError(f"`{name}` is for a teacher given by name, and this one is loaded: leave it out.")
    return teacher
