"""From sampling options to a `Sampling`."""

from typing import Any

from trl.generation.sampling import with_overrides
from trl.types import Sampling


def sampling_of(args: Any) -> Sampling:
    """The sampling of these arguments (`trl.trainer.arguments.SamplingArguments`) of an online method.

    What `generation_kwargs` overrides is moved to its field, because it holds for the loss too.
    """
    sampling = Sampling(
        max_tokens=args.longest_completion,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        extra=args.generation_kwargs or {},
    )
    return with_overrides(sampling)
