"""Log-probs and entropies of chosen tokens straight from hidden states and LM head.

Logits exist for one chunk of tokens at a time, forward and backward: memory does not grow with tokens times vocabulary.
Shapes: T tokens, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

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
    """Log-prob of each target, and entropy of the distribution it comes from, both `[T]`, in nats.

    Both are differentiable. Sums over the vocabulary run in float32 (float64 for float64 input).

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]`, `bias`: `[V]`.
        targets: `[T]` token ids.
        compute_dtype: type of the matrix products; the type of `hidden` when not given.
        chunk_elements: logits of one chunk; by the device when not given.
    """
    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if hidden.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    transform = transform or LogitTransform()
    dtype = compute_dtype or hidden.dtype
    # Cast outside of the function, where autograd casts the gradients back.
    cast_bias = None if bias is None else bias.to(dtype)
    return _ChosenLogps.apply(hidden.to(dtype), weight.to(dtype), cast_bias, targets, transform, chunk_elements)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    raw = torch.nn.functional.linear(hidden, weight, bias)
    if raw.dtype in (torch.bfloat16, torch.float16):
        raw = raw.float()
    return transform.forward(raw)


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
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, chunk_elements // weight.shape[0])
        keep = len(hidden) * weight.shape[0] <= KEPT_ELEMENTS
        # Results have their place before the first chunk: small tensors left between the large ones of every chunk
        # would keep the CPU's allocator from using the same memory for the next.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normalizer, logp, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        shares: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk):
                piece = slice(start, start + chunk)
                y = targets[piece, None]
                logits = _logits(hidden[piece], weight, bias, transform)
                log_p = logits.log_softmax(1)
                logp[piece] = log_p.gather(1, y).squeeze(1)
                normalizer[piece] = logits.gather(1, y).squeeze(1) - logp[piece]
                p = log_p.exp()
                entropy[piece] = -torch.linalg.vecdot(p, log_p)
                if keep:
                    shares.append(p)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, *shares)
        ctx.transform, ctx.chunk = transform, chunk
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, bias, targets, normalizer, entropy, *shares = ctx.saved_tensors
        grad_logp = torch.zeros_like(normalizer) if grad_logp is None else grad_logp
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accumulate) if bias is not None and ctx.needs_input_grad[2] else None
        grad_hidden = torch.empty_like(hidden)
        kept_suffices = bool(shares) and grad_entropy is None and ctx.transform.softcap is None
        with torch.autocast(hidden.device.type, enabled=False):
            for i, start in enumerate(range(0, len(hidden), ctx.chunk)):
                piece = slice(start, start + ctx.chunk)
                h = hidden[piece]
                if kept_suffices:
                    grad = _logp_grad(shares[i], targets[piece], grad_logp[piece], ctx.transform)
                else:
                    grad = _logits_grad(
                        _logits(h, weight, bias, ctx.transform),
                        targets[piece],
                        normalizer[piece],
                        entropy[piece],
                        grad_logp[piece],
                        None if grad_entropy is None else grad_entropy[piece],
                        ctx.transform,
                    )
                if grad_bias is not None:
                    grad_bias.add_(grad.sum(0))
                grad = grad.to(hidden.dtype)
                grad_hidden[piece] = grad @ weight
                if grad_weight is not None and grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, h)
                elif grad_weight is not None:
                    grad_weight.add_(grad.T @ h)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _logp_grad(p: Tensor, targets: Tensor, grad_logp: Tensor, transform: LogitTransform) -> Tensor:
    """`[t, V]` gradient of the raw logits from kept probabilities: `g (onehot - p)`; no soft-capping."""
    scaled = grad_logp * (transform.scale / transform.temperature)
    grad = p * -scaled[:, None]
    return grad.scatter_add_(1, targets[:, None], scaled[:, None].to(grad.dtype))


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    transform: LogitTransform,
) -> Tensor:
    """`[t, V]` gradient of the raw logits: `g_logp (onehot - p) - g_H p (log p + H)`, through the transform."""
    # The transform's own derivative needs the logits again.
    logp = logits - normalizer[:, None] if transform.softcap is not None else logits.sub_(normalizer[:, None])
    coefficient = -grad_logp[:, None]
    if grad_entropy is not None:
        coefficient = coefficient - grad_entropy[:, None] * (logp + entropy[:, None])
    grad = logp.exp_().mul_(coefficient) if grad_entropy is None else logp.exp().mul_(coefficient)
    grad.scatter_add_(1, targets[:, None], grad_logp[:, None].to(grad.dtype))
    return transform.backward(grad, logits)
