"""The chat template functions under their documented import path."""

from trl.data.templates.clone import clone_chat_template
from trl.data.templates.probing import (
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    supports_tool_calling,
)
from trl.data.templates.source import has_generation_markers
from trl.data.templates.training import get_training_chat_template

__all__ = [
    "clone_chat_template",
    "get_training_chat_template",
    "has_generation_markers",
    "is_chat_template_prefix_preserving",
    "is_chat_template_stop_token_trained",
    "supports_tool_calling",
]
