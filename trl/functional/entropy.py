"""What is done with the entropy of the policy's next-token distributions."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


def top_entropy_threshold(entropies: Tensor, share: float) -> Tensor:
    """Scalar: the entropy at or above which a token is among the `share` of highest entropy.

    (Wang et al., "Beyond the 80/20 rule", arXiv:2506.01939.) `entropies`: `[T]` of all loss tokens of all ranks.
    """
    if entropies.numel() == 0:
        return entropies.new_tensor(float("-inf"))
    # torch.quantile refuses more than 2**24 values; sorting once has no such limit.
    ordered = entropies.float().sort().values
    position = (1.0 - share) * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)


@dataclass
class EntropyController:
    """Steers the weight of the entropy bonus towards a target entropy.

    The bonus applies only while the entropy last seen is at or below the target; the weight grows by `step` per
    optimizer step while it is, and shrinks by `step` while it is not.
    """

    coef: float
    target: float
    step: float
    low: float
    high: float
    last_entropy: float | None = None

    @property
    def active_coef(self) -> float:
        """The weight to use now."""
        if self.last_entropy is not None and self.last_entropy <= self.target:
            return self.coef
        return 0.0

    def update(self, entropy: float) -> None:
        """Takes the mean entropy of an optimizer step, in nats per token."""
        self.last_entropy = entropy
        change = self.step if entropy <= self.target else -self.step
        self.coef = min(max(self.coef + change, self.low), self.high)

    def state_dict(self) -> dict[str, float | None]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        self.coef = state["coef"]  # type: ignore[assignment]
        self.last_entropy = state["last_entropy"]
