"""Log-probs and entropies of chosen tokens straight from hidden states and LM head.

Logits exist for one chunk of tokens at a time, forward and backward: memory does not grow with tokens times vocabulary.
Shapes: T tokens, H hidden size, V vocabulary, K ids asked for at each position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CPU_CHUNK_ELEMENTS = 1 << 22
"""Logits of one chunk on a processor: 16 MiB in float32, which its cache holds."""

GPU_CHUNK_ELEMENTS = 1 << 27
"""Logits of one chunk on a GPU: 512 MiB in float32, so that one product fills it and launches cost nothing."""

KEPT_ELEMENTS = 1 << 25
"""Up to this many probabilities (128 MiB in float32) are kept for the backward pass; a larger batch repeats them."""


@dataclass(frozen=True)
class LogitTransform:
    """What happens to `hidden @ weight.T + bias` before the softmax.

    Attributes:
        scale: a model family's constant factor.
        softcap: `softcap * tanh(logits / softcap)` when set.
        temperature: divides the result.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def forward(self, raw: Tensor) -> Tensor:
        """The logits. May overwrite `raw`."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return raw if factor == 1.0 else raw.mul_(factor)
        return raw.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient of `raw` from that of the logits. May overwrite `grad`."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return grad if factor == 1.0 else grad.mul_(factor)
        tanh = logits * (self.temperature / self.softcap)
        return grad.mul_(1 - tanh**2).mul_(self.scale / self.temperature)


class Chosen(NamedTuple):
    """Result of `chosen_with_statistics`.

    Attributes:
        logps: `[T]` or `[T, K]` like the targets.
        entropies: `[T]`, in nats.
        statistics: `[T]` by name, without gradient.
    """

    logps: Tensor
    entropies: Tensor
    statistics: dict[str, Tensor]


# name -> from logits, log-probs `[t, V]` and the targets' log-probs `[t, K]` to `[t]`
STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "is_top1": lambda logits, log_p, logp: (logp[:, 0] >= log_p.amax(1)).to(logp.dtype),
    "mean_logits": lambda logits, log_p, logp: logits.mean(1),
    "log_sum_sq_probs": lambda logits, log_p, logp: (2 * log_p).logsumexp(1),
}
"""What may be told of the distributions beside: whether the (first) target is the likeliest token, the mean of the
logits, and `log sum_v p_v^2`."""


def chosen_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    compute_dtype: torch.dtype | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, `[T]` or `[T, K]` like `targets`, and entropy `[T]` of the distributions, in nats.

    Both are differentiable. Sums over the vocabulary run in float32 (float64 for float64 input).

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]`, `bias`: `[V]`.
        targets: `[T]` token ids, or `[T, K]`: at least one at each position.
        compute_dtype: type of the matrix products; the type of `hidden` when not given.
        chunk_elements: logits of one chunk; by the device when not given.
    """
    chosen = chosen_with_statistics(
        hidden,
        weight,
        targets,
        bias=bias,
        transform=transform,
        compute_dtype=compute_dtype,
        chunk_elements=chunk_elements,
    )
    return chosen.logps, chosen.entropies


def chosen_with_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    statistics: Sequence[str] = (),
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    compute_dtype: torch.dtype | None = None,
    chunk_elements: int | None = None,
) -> Chosen:
    """As `chosen_logps`, with further numbers of the same distributions.

    Args:
        statistics: names out of `STATISTICS`.
    """
    if chunk_elements is None:
        chunk_elements = default_chunk_elements(hidden.device)
    transform = transform or LogitTransform()
    dtype = compute_dtype or hidden.dtype
    # Cast outside of the function, where autograd casts the gradients back.
    cast_bias = None if bias is None else bias.to(dtype)
    columns = targets if targets.ndim == 2 else targets[:, None]
    names = tuple(statistics)
    logps, entropies, *told = _ChosenLogps.apply(
        hidden.to(dtype), weight.to(dtype), cast_bias, columns, transform, chunk_elements, names
    )
    return Chosen(logps.view(targets.shape), entropies, dict(zip(names, told, strict=True)))


def default_chunk_elements(device: torch.device) -> int:
    """How many logits a chunk holds on this device."""
    return CPU_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """`[t, V]` logits, a new tensor in float32 at least."""
    raw = torch.nn.functional.linear(hidden, weight, bias)
    if raw.dtype in (torch.bfloat16, torch.float16):
        raw = raw.float()
    return transform.forward(raw)


class HeadGradients:
    """Gradients of an LM head's `hidden`, `weight` and `bias`, added up chunk by chunk of the raw logits' gradient.

    `hidden`, `weight` and `bias` have one type; the sums over tokens run in float32 at least. `needed` says of each of
    the three whether its gradient is asked for.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        self._hidden, self._weight = hidden, weight
        self._grad_hidden = torch.empty_like(hidden)
        self._grad_weight = torch.zeros_like(weight, dtype=accumulate) if needed[1] else None
        self._grad_bias = torch.zeros_like(bias, dtype=accumulate) if bias is not None and needed[2] else None

    def add(self, piece: slice, grad: Tensor) -> None:
        """Takes the `[t, V]` gradient of the raw logits of the tokens `piece`; each token comes once."""
        if self._grad_bias is not None:
            self._grad_bias.add_(grad.sum(0))
        grad = grad.to(self._hidden.dtype)
        self._grad_hidden[piece] = grad @ self._weight
        if self._grad_weight is not None and self._grad_weight.dtype == grad.dtype:
            self._grad_weight.addmm_(grad.T, self._hidden[piece])
        elif self._grad_weight is not None:
            self._grad_weight.add_(grad.T @ self._hidden[piece])

    def result(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of `hidden`, `weight` and `bias` in their own type."""
        dtype = self._weight.dtype
        return (
            self._grad_hidden,
            None if self._grad_weight is None else self._grad_weight.to(dtype),
            None if self._grad_bias is None else self._grad_bias.to(dtype),
        )


class _ChosenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        chunk_elements: int,
        statistics: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        chunk = max(1, chunk_elements // weight.shape[0])
        keep = len(hidden) * weight.shape[0] <= KEPT_ELEMENTS
        # Results have their place before the first chunk: small tensors left between the large ones of every chunk
        # would keep the CPU's allocator from using the same memory for the next.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normalizer, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        logp = hidden.new_empty(targets.shape, dtype=dtype)
        told = [torch.empty_like(entropy) for _ in statistics]
        shares: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk):
                piece = slice(start, start + chunk)
                y = targets[piece]
                logits = head_logits(hidden[piece], weight, bias, transform)
                log_p = logits.log_softmax(1)
                logp[piece] = log_p.gather(1, y)
                for name, out in zip(statistics, told, strict=True):
                    out[piece] = STATISTICS[name](logits, log_p, logp[piece])
                normalizer[piece] = logits.gather(1, y[:, :1]).squeeze(1) - logp[piece, 0]
                p = log_p.exp()
                entropy[piece] = -torch.linalg.vecdot(p, log_p)
                if keep:
                    shares.append(p)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, *shares)
        ctx.transform, ctx.chunk = transform, chunk
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*told)
        return logp, entropy, *told

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads[:2]
        hidden, weight, bias, targets, normalizer, entropy, *shares = ctx.saved_tensors
        grad_logp = torch.zeros_like(targets, dtype=normalizer.dtype) if grad_logp is None else grad_logp
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        kept_suffices = bool(shares) and grad_entropy is None and ctx.transform.softcap is None
        with torch.autocast(hidden.device.type, enabled=False):
            for i, start in enumerate(range(0, len(hidden), ctx.chunk)):
                piece = slice(start, start + ctx.chunk)
                if kept_suffices:
                    grad = _logp_grad(shares[i], targets[piece], grad_logp[piece], ctx.transform)
                else:
                    grad = _logits_grad(
                        head_logits(hidden[piece], weight, bias, ctx.transform),
                        targets[piece],
                        normalizer[piece],
                        entropy[piece],
                        grad_logp[piece],
                        None if grad_entropy is None else grad_entropy[piece],
                        ctx.transform,
                    )
                gradients.add(piece, grad)
        return *gradients.result(), None, None, None, None


def _logp_grad(p: Tensor, targets: Tensor, grad_logp: Tensor, transform: LogitTransform) -> Tensor:
    """`[t, V]` gradient of the raw logits from kept probabilities: sum of `g (onehot - p)` over targets; no softcap."""
    scaled = grad_logp * (transform.scale / transform.temperature)
    grad = p * -scaled.sum(1, keepdim=True)
    return grad.scatter_add_(1, targets, scaled.to(grad.dtype))


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    transform: LogitTransform,
) -> Tensor:
    """`[t, V]` gradient of the raw logits: `g_logp (onehot - p)`, summed over the targets, and `-g_H p (log p + H)`,
    through the transform.
    """
    # The transform's own derivative needs the logits again.
    logp = logits - normalizer[:, None] if transform.softcap is not None else logits.sub_(normalizer[:, None])
    coefficient = -grad_logp.sum(1, keepdim=True)
    if grad_entropy is not None:
        coefficient = coefficient - grad_entropy[:, None] * (logp + entropy[:, None])
    grad = logp.exp_().mul_(coefficient) if grad_entropy is None else logp.exp().mul_(coefficient)
    grad.scatter_add_(1, targets, grad_logp.to(grad.dtype))
    return transform.backward(grad, logits)
