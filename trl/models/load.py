"""From a name or a module to a policy that is ready to train."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from trl.errors import ConfigError
from trl.models.attention import PACKED_ATTENTION

logger = logging.getLogger(__name__)

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

# With these the model's own attention may be replaced by the packed form of the same computation.
_PACKABLE = (None, "sdpa")


def load_policy(
    name: str, init_kwargs: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model of this name or folder, in float32 unless `init_kwargs` says otherwise.

    Raises:
        ConfigError: the model cannot be found, or its attention implementation cannot be had.
    """
    kwargs = {"dtype": "float32", "trust_remote_code": trust_remote_code, **_renamed(init_kwargs)}
    try:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except OSError as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"The model `{name}` cannot be loaded: {first_line}") from error
    except ImportError as error:
        wanted = kwargs.get("attn_implementation")
        raise ConfigError(
            f"The model `{name}` needs a package that is not installed"
            f"{f' (attn_implementation={wanted!r})' if wanted else ''}: {error} "
            "Install it, or choose `attn_implementation='sdpa'`."
        ) from error


def _renamed(init_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments, with the dtype under its newer name."""
    kwargs = dict(init_kwargs or {})
    if "torch_dtype" in kwargs:
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    return kwargs


def weight_bytes(name: str, init_kwargs: dict[str, Any], trust_remote_code: bool = False) -> int:
    """What the weights of this model take as `load_policy` loads them; only its config is read.

    Raises:
        ConfigError: the model cannot be found.
    """
    kwargs = _renamed(init_kwargs)
    dtype = kwargs.get("dtype", "float32")
    revision = {"revision": kwargs["revision"]} if "revision" in kwargs else {}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The model `{name}` cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    own = config.dtype or torch.float32
    chosen = own if dtype == "auto" else dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return sum(p.numel() for p in model.parameters()) * chosen.itemsize


def load_tokenizer(model: PreTrainedModel, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that stands beside the model on disk or hub.

    Raises:
        ConfigError: the model has no name, or no tokenizer stands there.
    """
    name = model.config._name_or_path
    if not name:
        raise ConfigError("The model was made in memory, so its tokenizer is unknown: pass `processing_class`.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No tokenizer stands beside the model `{name}`: pass `processing_class`. ({error})"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # For some families transformers makes one up where there is none.
        raise ConfigError(f"No tokenizer stands beside the model `{name}`: pass `processing_class`.")
    return tokenizer


def use_packed_attention(model: PreTrainedModel) -> None:
    """Lets the model attend to packed sequences, where it uses PyTorch's attention and the interface for it."""
    if model.config._attn_implementation not in _PACKABLE or not model._supports_attention_backend:
        return
    model.set_attn_implementation(PACKED_ATTENTION)


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: those of the model's generation config, and the tokenizer's.

    Raises:
        ConfigError: there is none, so that no completion could ever end.
    """
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, (list, tuple)) else [declared]
    found = frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)
    if not found:
        raise ConfigError(
            "Neither the tokenizer nor the model's generation config has an end-of-sequence token: set "
            "`tokenizer.eos_token`."
        )
    return found


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout to zero: modules, and the probabilities that layers read from attributes of their own."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            # `attention_dropout`, `dropout`, `resid_pdrop`, `layerdrop`: every family has names of its own.
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def compute_dtype(args: TrainingArguments, model: nn.Module) -> str:
    """The name of the dtype a model computes in under these arguments: mixed precision's, or that of its weights."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")


def check_same_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, other: PreTrainedModel, *, trust_remote_code: bool
) -> None:
    """Raises unless `other` can read what `model` writes: the same id is the same token.

    Families pad their vocabularies to different sizes; that alone does no harm.

    Raises:
        ConfigError: with a token that differs, or the sizes where no tokenizer stands beside `other`.
    """
    try:
        others: PreTrainedTokenizerBase | None = load_tokenizer(other, trust_remote_code)
    except ConfigError:
        others = None
    if others is not None:
        tokens = {index: token for token, index in tokenizer.get_vocab().items()}
        for token, index in others.get_vocab().items():
            if tokens.get(index, token) != token:
                raise ConfigError(
                    f"The teacher has other tokens than the model: id {index} is {token!r} there and {tokens[index]!r} "
                    "here. Choose a teacher of the same family."
                )
    own, told = (m.config.get_text_config().vocab_size for m in (model, other))
    known = 1 + max(tokenizer.get_vocab().values()) if others is not None else own
    if told < known:
        raise ConfigError(
            f"The teacher has fewer tokens than the model writes (got {told} and {known}): choose a teacher of the "
            "same family."
        )
