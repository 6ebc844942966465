"""Loading and running a model. Importing this package loads neither torch nor transformers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.models.checkpointing import enable_selective_activation_checkpointing
    from trl.models.offload import get_act_offloading_ctx_manager

# public name -> module that defines it
_MODULES = {
    "enable_selective_activation_checkpointing": "trl.models.checkpointing",
    "get_act_offloading_ctx_manager": "trl.models.offload",
}

__all__ = ["enable_selective_activation_checkpointing", "get_act_offloading_ctx_manager"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
