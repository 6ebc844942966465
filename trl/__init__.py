"""Post-training of language models. Names resolve on first use: `import trl` loads neither torch nor transformers."""

import importlib
from typing import Any

from trl._version import __version__

# public name -> module that has it
_NAMES = {
    "GRPOConfig": "trl.trainer.grpo_config",
    "GRPOTrainer": "trl.trainer.grpo_trainer",
    "RLOOConfig": "trl.trainer.rloo_config",
    "RLOOTrainer": "trl.trainer.rloo_trainer",
    "DistillationConfig": "trl.trainer.distillation_config",
    "DistillationTrainer": "trl.trainer.distillation_trainer",
    "SFTConfig": "trl.trainer.sft_config",
    "SFTTrainer": "trl.trainer.sft_trainer",
    "DPOConfig": "trl.trainer.dpo_config",
    "DPOTrainer": "trl.trainer.dpo_trainer",
    "KTOConfig": "trl.trainer.kto_config",
    "KTOTrainer": "trl.trainer.kto_trainer",
    "SyncRefModelCallback": "trl.trainer.callbacks",
    "DatasetMixtureConfig": "trl.cli.arguments",
    "ModelConfig": "trl.cli.arguments",
    "ScriptArguments": "trl.cli.arguments",
    "TrlParser": "trl.cli.parser",
    "get_dataset": "trl.cli.datasets",
    "get_peft_config": "trl.cli.model",
    "get_quantization_config": "trl.cli.model",
    "clone_chat_template": "trl.data.templates.clone",
    "get_training_chat_template": "trl.data.templates.training",
    "supports_tool_calling": "trl.data.templates.probing",
    "pack_dataset": "trl.data.packing",
    "apply_chat_template": "trl.data.chat",
    "maybe_apply_chat_template": "trl.data.chat",
    "extract_prompt": "trl.data.formats",
    "is_conversational": "trl.data.formats",
    "is_conversational_from_value": "trl.data.formats",
    "maybe_convert_to_chatml": "trl.data.formats",
    "maybe_extract_prompt": "trl.data.formats",
    "maybe_unpair_preference_dataset": "trl.data.formats",
    "prepare_multimodal_messages": "trl.data.formats",
    "unpair_preference_dataset": "trl.data.formats",
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'trl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
