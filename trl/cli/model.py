"""From the options of `ModelConfig` to what a trainer takes. Heavy packages are imported where they are used."""

from typing import TYPE_CHECKING, Any

from trl._deps import require
from trl.cli.arguments import ModelConfig

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig


def get_peft_config(model_args: ModelConfig) -> "PeftConfig | None":
    """The LoRA configuration that `model_args` describes, None without `use_peft`.

    Raises:
        MissingDependencyError: `use_peft` without the package peft.
    """
    if not model_args.use_peft:
        return None
    require("peft", "`use_peft`")
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> "BitsAndBytesConfig | None":
    """The bitsandbytes configuration that `model_args` describes, None without quantisation.

    Raises:
        MissingDependencyError: quantisation without the package bitsandbytes.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    require("bitsandbytes", "`load_in_4bit`" if model_args.load_in_4bit else "`load_in_8bit`")
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_model_init_kwargs(model_args: ModelConfig, explicit: dict[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of `from_pretrained`: those of `model_args`, overridden by `explicit`. None among ours is left out.

    A quantised model is put on the process's own GPU, because quantised weights cannot be moved afterwards.
    """
    derived: dict[str, Any] = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    if model_args.load_in_4bit or model_args.load_in_8bit:
        from accelerate import PartialState

        derived["device_map"] = {"": PartialState().local_process_index}
    return {name: value for name, value in derived.items() if value is not None} | (explicit or {})
