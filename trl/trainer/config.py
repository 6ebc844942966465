"""What every trainer's config adds to `transformers.TrainingArguments`."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from trl.errors import ConfigError
from trl.models.checkpointing import checkpointing_kwargs
from trl.trainer.arguments import BaseArguments

# Dictionary options of `transformers.TrainingArguments` that also take the name of a file or of a preset.
_MAY_BE_A_PATH = ("accelerator_config", "fsdp_config", "deepspeed", "parallelism_config", "debug")


@dataclass
class TrainerConfig(BaseArguments, TrainingArguments):  # type: ignore[misc]  # `bf16` may be None, not asked for
    """`TrainingArguments` with this package's defaults; precision that was not asked for follows the hardware."""

    _VALID_DICT_FIELDS = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "teacher_model_init_kwargs",
        "dataset_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    def __post_init__(self) -> None:
        # Fields of other methods may be missing here: the parent reads every name in the list.
        self._VALID_DICT_FIELDS = [name for name in self._VALID_DICT_FIELDS if name in self.__dataclass_fields__]
        for name in self._VALID_DICT_FIELDS:
            setattr(self, name, _as_dict(name, getattr(self, name)))
        self._resolve_precision()
        if isinstance(self.gradient_checkpointing_kwargs, dict):
            self.gradient_checkpointing_kwargs = checkpointing_kwargs(self.gradient_checkpointing_kwargs)
        if "activation_checkpointing_kwargs" in self.__dataclass_fields__ and self.gradient_checkpointing_kwargs:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
            self.gradient_checkpointing_kwargs = None
        if "activation_checkpointing" in self.__dataclass_fields__ and self.activation_checkpointing is None:
            # The newer name in transformers; the older one stays ours.
            self.activation_checkpointing = self.gradient_checkpointing
            self.gradient_checkpointing = None
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False
        super().__post_init__()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss looks at a reference model."""
        return False

    def _check_choices(self, choices: dict[str, tuple[Any, ...]]) -> None:
        """Raises `ConfigError` for an option that is none of its choices."""
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"`{name}` must be one of {', '.join(allowed)} (got {value!r}).")

    def _resolve_precision(self) -> None:
        """Sets `bf16` from what the hardware has where it was not given, and refuses what it does not have."""
        on_gpu = torch.cuda.is_available() and not self.use_cpu
        gpu_has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        if self.bf16 is None:
            self.bf16 = gpu_has_bf16 and not self.fp16
        elif self.bf16 and on_gpu and not gpu_has_bf16:
            raise ConfigError(
                f"`bf16=True`, but {torch.cuda.get_device_name()} has no bfloat16: set `bf16=False, fp16=True`."
            )
        elif self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # the parent would otherwise look for a GPU
        if self.fp16 and not torch.accelerator.is_available():
            raise ConfigError("`fp16=True` needs a GPU, and there is none: leave it out, or set `bf16=True`.")


def _as_dict(name: str, value: Any) -> Any:
    """The value; of a text that is JSON, what it says.

    Raises:
        ConfigError: a text that is no JSON object.
    """
    if not isinstance(value, str) or name in _MAY_BE_A_PATH:
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(f"`{name}` must be a mapping, or a JSON object as text (got {value!r}).")
    return parsed
