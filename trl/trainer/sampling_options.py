"""From sampling options to a `Sampling`."""

from dataclasses import fields, replace
from typing import Any

from trl.types import Sampling

_FIELDS = {f.name: f.name for f in fields(Sampling) if f.name not in ("n", "extra")} | {"max_new_tokens": "max_tokens"}


def sampling_of(args: Any) -> Sampling:
    """The sampling of these arguments (`trl.trainer.arguments.SamplingArguments`).

    What `generation_kwargs` overrides is moved to its field, because it holds for the loss too.
    """
    extra = dict(args.generation_kwargs or {})
    overrides = {_FIELDS[name]: extra.pop(name) for name in list(extra) if name in _FIELDS}
    sampling = Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        extra=extra,
    )
    return replace(sampling, **overrides)
