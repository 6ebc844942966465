"""What the losses of the slices of a generation batch divide by."""

from collections.abc import Sequence

from trl.types import Normalizer


def step_normalizers(
    tokens: Sequence[float], sequences: Sequence[float], accumulation: int, max_length: int
) -> list[Normalizer]:
    """One normalizer per slice, so that the losses of an optimizer step's slices add up to the loss of the step.

    Args:
        tokens: loss tokens of each slice, per process: those of all processes over their number.
        sequences: sequences of each slice, per process.
        accumulation: slices of one optimizer step.
        max_length: `max_completion_length`.
    """
    norms = []
    for i in range(len(tokens)):
        first = i // accumulation * accumulation
        step = slice(first, first + accumulation)
        # An optimizer step may reach beyond this generation batch: what is not known yet counts as the average.
        share = accumulation / len(tokens[step])
        norms.append(
            Normalizer(
                sequences=sum(sequences[step]) * share,
                tokens=sum(tokens[step]) * share,
                generation_tokens=sum(tokens) * accumulation / len(tokens),
                max_length=max_length,
            )
        )
    return norms
