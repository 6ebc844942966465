"""Selective activation checkpointing: the results of attention are kept, everything else is computed again.

Attention is the one part of a layer whose cost grows with the square of the length, while its result is no larger than
the layer's input: keeping it saves most of what a second forward pass costs, for little memory.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from trl.errors import ConfigError

SELECTIVE = "selective"
"""The entry of `gradient_checkpointing_kwargs` that turns it on."""

ATTENTION_OPS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "torch_attn::_varlen_attn",
    }
)
"""PyTorch's attention kernels, as its dispatcher calls them."""


def keeps(op: Any) -> bool:
    """Whether an operation's results are kept: those of PyTorch's attention kernels and of Flash Attention's.

    Flash Attention comes as a package and as kernels of the hub, whose namespaces end in a hash.
    """
    name = str(op.name()).partition(".")[0]
    if name in ATTENTION_OPS:
        return True
    namespace, _, function = name.partition("::")
    if "flash_attn" not in namespace or function.endswith(("bwd", "backward")):
        return False
    # What writes into its arguments has to run again.
    return isinstance(op, OpOverload) and not op._schema.is_mutable


def checkpointing_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What transformers takes as `gradient_checkpointing_kwargs`, from what the user gave; applied twice, the same.

    `{"selective": True}` becomes a `context_fn` of `torch.utils.checkpoint.checkpoint`; further entries are passed on.

    Raises:
        ConfigError: `selective` is no truth value, or stands beside an entry it cannot be combined with.
    """
    if given is None:
        return None
    kwargs = dict(given)
    selective = kwargs.pop(SELECTIVE, False)
    if not isinstance(selective, bool):
        raise ConfigError(f"`selective` of `gradient_checkpointing_kwargs` must be true or false (got {selective!r}).")
    if not selective:
        return kwargs
    if kwargs.setdefault("use_reentrant", False):
        raise ConfigError(
            "`gradient_checkpointing_kwargs` cannot have both `selective=True` and `use_reentrant=True`: reentrant "
            "checkpointing keeps nothing. Leave `use_reentrant` out."
        )
    if kwargs.setdefault("context_fn", _CONTEXTS) is not _CONTEXTS:
        raise ConfigError(
            "`gradient_checkpointing_kwargs` cannot have both `selective=True` and a `context_fn`: each says what is "
            "kept. Leave one of them out."
        )
    return kwargs


def is_selective(kwargs: Mapping[str, Any] | None) -> bool:
    """Whether these `gradient_checkpointing_kwargs`, the user's or those for transformers, keep attention's results."""
    return kwargs is not None and (kwargs.get(SELECTIVE) is True or isinstance(kwargs.get("context_fn"), Contexts))


def enable_selective_activation_checkpointing(model: PreTrainedModel) -> None:
    """Turns gradient checkpointing on, of which attention's results are exempt.

    A backward pass can be run once only: what is kept is given up as it is used. Attention in plain matrix products
    (`attn_implementation="eager"`) has no result of its own to keep, which is warned about.
    """
    if model.config._attn_implementation == "eager":
        warnings.warn(
            "Selective activation checkpointing keeps nothing of a model whose `attn_implementation` is 'eager': all "
            "of it is computed again. Load the model with `attn_implementation='sdpa'`.",
            stacklevel=2,
        )
    with warnings.catch_warnings():
        # The newer name is not there in every version supported.
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing_kwargs({SELECTIVE: True}))


def _policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(op) else CheckpointPolicy.PREFER_RECOMPUTE


class Contexts(str):
    """The contexts of a checkpoint that keeps attention's results. A word too, so that configs can be written."""

    __slots__ = ()

    def __call__(self) -> tuple[Any, Any]:
        """Of the forward pass, and of the computation repeated."""
        return create_selective_checkpoint_contexts(_policy)


_CONTEXTS = Contexts(SELECTIVE)
