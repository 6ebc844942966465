"""The loss of a reward model.

Shapes: P pairs.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid


def reward_model_losses(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, center_coefficient: float | None = None
) -> Tensor:
    """`[P]` `-log sigmoid(x_c - x_r - m) + c (x_c + x_r)^2`: the loss of Bradley and Terry with a margin (Llama 2,
    arXiv:2307.09288, eq. 2), and a term that keeps the rewards' mean at 0 (arXiv:2312.09244).

    Args:
        chosen, rejected: `[P]` `x_c` and `x_r`, what the model made of the two completions.
        margins: `[P]` `m`, how much better the chosen ones should score; None is 0.
        center_coefficient: `c`; None is 0.
    """
    difference = chosen - rejected
    losses = -logsigmoid(difference if margins is None else difference - margins)
    return losses if center_coefficient is None else losses + center_coefficient * (chosen + rejected) ** 2
