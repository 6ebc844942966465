"""The data functions under their documented import path."""

from trl.data.chat import apply_chat_template, maybe_apply_chat_template
from trl.data.formats import (
    extract_prompt,
    get_dataset_column_names,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    prepare_multimodal_messages,
    unpair_preference_dataset,
)
from trl.data.packing import pack_dataset

__all__ = [
    "apply_chat_template",
    "extract_prompt",
    "get_dataset_column_names",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "prepare_multimodal_messages",
    "unpair_preference_dataset",
]
