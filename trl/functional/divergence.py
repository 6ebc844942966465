"""Divergences between the next-token distributions of a student and a teacher, as distillation minimises them.

`divergences` compares two models over the whole vocabulary, straight from hidden states and LM heads;
`support_divergence` compares the few log-probs that a server hands out. Both take `beta` the same way:

* 0: forward KL, `KL(p_t || p_s)`;
* 1: reverse KL, `KL(p_s || p_t)`;
* between: `beta KL(p_t || m) + (1 - beta) KL(p_s || m)` with `m = (1 - beta) p_s + beta p_t`, the generalised
  Jensen-Shannon divergence (GKD, arXiv:2306.13649, section 3).

At its ends the last does not tend to the two KLs but to 0: like `beta KL(p_t || p_s)` where beta is small, and like
`(1 - beta) KL(p_s || p_t)` where it is close to 1. Whoever moves beta there moves the size of the loss as well.

Shapes: T tokens, H hidden size (of either model), V vocabulary, K support size; t tokens of one chunk. In names, `s` is
the student, `t` the teacher and `m` their mixture.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl.functional.logps import KEPT_ELEMENTS, HeadGradients, LogitTransform, default_chunk_elements, head_logits

LEAST_LOGP = -1e4
"""Stands for an impossible token's log-prob: its `exp` is 0 in every type, and arithmetic with it has gradients."""


@dataclass(frozen=True, eq=False)
class Head:
    """What a model's next-token distributions are computed from.

    Attributes:
        hidden: `[T, H]`.
        weight: `[V, H]` of the LM head.
        bias: `[V]`, or None.
        transform: from the head's product to the logits.
        compute_dtype: type of the matrix product; the type of `hidden` when None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform = LogitTransform()
    compute_dtype: torch.dtype | None = None


def divergences(
    student: Head, teacher: Head, beta: float, *, chunk_elements: int | None = None
) -> tuple[Tensor, Tensor]:
    """Divergence at each token, and the student's entropy there, both `[T]`, in nats.

    The divergence is differentiable with respect to the student's tensors; nothing else has a gradient. Logits of both
    models exist for one chunk of tokens at a time. Sums over the vocabulary run in float32 (float64 for float64 input).

    Model families pad their vocabularies to different sizes: of two sizes only the first `min(V_s, V_t)` ids count, and
    both distributions, also the one of the entropy, are over these alone.

    Args:
        student: the model being trained.
        teacher: hidden states of the same tokens; H and types may differ from the student's.
        beta: from 0 to 1, as the module says.
        chunk_elements: logits of one chunk, both models together; by the device when not given.
    """
    assert len(student.hidden) == len(teacher.hidden), "student and teacher must see the same tokens"
    vocabulary = min(len(student.weight), len(teacher.weight))
    with torch.no_grad():
        teacher = _first_ids(teacher, vocabulary)
    student = _first_ids(student, vocabulary)
    if chunk_elements is None:
        chunk_elements = default_chunk_elements(student.hidden.device)
    return _Divergences.apply(
        student.hidden,
        student.weight,
        student.bias,
        student.transform,
        teacher,
        _formula(beta),
        max(1, chunk_elements // (2 * vocabulary)),
        torch.is_grad_enabled() and len(student.hidden) * vocabulary <= KEPT_ELEMENTS,
    )


def support_divergence(
    student_logps: Tensor, teacher_logps: Tensor, beta: float, *, add_tail: bool, valid: Tensor | None = None
) -> Tensor:
    """`[T]` divergence over K ids of each token's distributions, in nats; differentiable in the student's log-probs.

    The sums are those of the whole divergence, over these ids only. Without the rest of the vocabulary they are no
    divergence: they may be negative. With it as one more id on either side they are a lower bound of the whole.

    Args:
        student_logps: `[T, K]`.
        teacher_logps: `[T, K]` of the same ids; an impossible id may be -inf, which counts as `LEAST_LOGP`.
        beta: from 0 to 1, as the module says.
        add_tail: add the rest of the vocabulary as one id. Its probability is kept just above 0, and has no gradient
            where the ids sum to 1.
        valid: `[T, K]` bool, places that count; None for all. The ids of one token's valid places must differ.
    """
    log_s, log_t = (_valid_logps(x, valid) for x in (student_logps, teacher_logps.detach()))
    if add_tail:
        log_s, log_t = (torch.cat([x, _log_rest(x)], dim=1) for x in (log_s, log_t))
    return _formula(beta).value(log_s.exp(), log_s, log_t)


def _valid_logps(logps: Tensor, valid: Tensor | None) -> Tensor:
    logps = logps.to(torch.promote_types(logps.dtype, torch.float32))
    if valid is not None:
        logps = torch.where(valid, logps, LEAST_LOGP)
    return logps.clamp(min=LEAST_LOGP)


def _log_rest(logps: Tensor) -> Tensor:
    """`[T, 1]` `log(1 - sum p)` of `[T, K]` log-probs, finite also where they sum to 1 or, rounded, to more."""
    log_sum = logps.logsumexp(1, keepdim=True).clamp(max=-torch.finfo(logps.dtype).eps)
    return (-torch.expm1(log_sum)).log()


@dataclass(frozen=True)
class _Formula:
    """A divergence as functions of `(p_s, log p_s, log p_t)`, each `[t, V]`.

    Attributes:
        value: `[t]`.
        gradient: `[t, V]` that of the value with respect to the student's logits.
    """

    value: Callable[[Tensor, Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


def _formula(beta: float) -> _Formula:
    assert 0 <= beta <= 1, f"beta must be between 0 and 1 (got {beta})"
    between = _Formula(partial(_mixed_value, beta), partial(_mixed_gradient, beta))
    return {0.0: _FORWARD, 1.0: _REVERSE}.get(beta, between)


def _log_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """`log p - log q`, and 0 where p is 0: what is infinite there does not count, as `0 log 0 = 0`."""
    return (log_p - log_q).masked_fill_(p == 0, 0.0)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """`[t]` KL(p || q)."""
    return torch.linalg.vecdot(p, _log_ratio(p, log_p, log_q))


def _kl_gradient(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """`[t, V]` gradient of KL(p || q) with respect to the logits of p, for a q that stays: `p (log p/q - KL)`."""
    ratio = _log_ratio(p, log_p, log_q)
    return ratio.sub_(torch.linalg.vecdot(p, ratio)[:, None]).mul_(p)


def _forward_value(p_s: Tensor, log_s: Tensor, log_t: Tensor) -> Tensor:
    return _kl(log_t.exp(), log_t, log_s)


def _forward_gradient(p_s: Tensor, log_s: Tensor, log_t: Tensor) -> Tensor:
    return p_s - log_t.exp()


_FORWARD = _Formula(_forward_value, _forward_gradient)
_REVERSE = _Formula(_kl, _kl_gradient)


def _log_mixture(beta: float, log_s: Tensor, log_t: Tensor) -> Tensor:
    """`log m`. Its own derivative, which only finite log-probs may ask for, is NaN where both are -inf."""
    return torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))


def _mixed_value(beta: float, p_s: Tensor, log_s: Tensor, log_t: Tensor) -> Tensor:
    log_m = _log_mixture(beta, log_s, log_t)
    return beta * _kl(log_t.exp(), log_t, log_m) + (1 - beta) * _kl(p_s, log_s, log_m)


def _mixed_gradient(beta: float, p_s: Tensor, log_s: Tensor, log_t: Tensor) -> Tensor:
    """`(1 - beta) p_s (log p_s/m - KL(p_s || m))`.

    The mixture moves too, but what that changes cancels: the derivative with respect to p_s is `(1 - beta)` times
    `log p_s/m + 1 - (beta p_t + (1 - beta) p_s) / m`, and the fraction is 1.
    """
    return _kl_gradient(p_s, log_s, _log_mixture(beta, log_s, log_t)).mul_(1 - beta)


def _first_ids(head: Head, vocabulary: int) -> Head:
    """The head of the first ids alone, in the type its product runs in."""
    # Casts and cuts are outside of the function, where autograd undoes them; a cut that takes all would cost a copy.
    dtype = head.compute_dtype or head.hidden.dtype
    weight, bias = head.weight, head.bias
    if vocabulary < len(weight):
        weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
    bias = None if bias is None else bias.to(dtype)
    return replace(head, hidden=head.hidden.to(dtype), weight=weight.to(dtype), bias=bias)


def _log_probs(student: Head, teacher: Head, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
    """The student's logits, and log-probs of student and teacher, each `[t, V]` of the tokens `piece`."""
    logits, teacher_logits = (head_logits(h.hidden[piece], h.weight, h.bias, h.transform) for h in (student, teacher))
    return logits, logits.log_softmax(1), teacher_logits.log_softmax(1).to(logits.dtype)


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        teacher: Head,
        formula: _Formula,
        chunk: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        student = Head(hidden, weight, bias, transform)
        keep = keep and any(ctx.needs_input_grad[:3])
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        divergence, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        kept: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk):
                piece = slice(start, start + chunk)
                logits, log_s, log_t = _log_probs(student, teacher, piece)
                p_s = log_s.exp()
                # Rounding may leave a difference of equals below 0.
                divergence[piece] = formula.value(p_s, log_s, log_t).clamp_(min=0)
                entropy[piece] = -torch.linalg.vecdot(p_s, log_s.masked_fill(p_s == 0, 0.0))
                if keep:
                    kept.append(transform.backward(formula.gradient(p_s, log_s, log_t), logits))
        ctx.save_for_backward(hidden, weight, bias, teacher.hidden, teacher.weight, teacher.bias, *kept)
        ctx.transforms, ctx.formula, ctx.chunk = (transform, teacher.transform), formula, chunk
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divergence: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, *kept = ctx.saved_tensors
        student = Head(hidden, weight, bias, ctx.transforms[0])
        teacher = Head(teacher_hidden, teacher_weight, teacher_bias, ctx.transforms[1])
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for i, start in enumerate(range(0, len(hidden), ctx.chunk)):
                piece = slice(start, start + ctx.chunk)
                grad = kept[i] if kept else _raw_gradient(student, teacher, ctx.formula, piece)
                gradients.add(piece, grad * grad_divergence[piece, None])
        return *gradients.result(), None, None, None, None, None


def _raw_gradient(student: Head, teacher: Head, formula: _Formula, piece: slice) -> Tensor:
    """`[t, V]` gradient of the divergences with respect to the student's logits before their transform."""
    logits, log_s, log_t = _log_probs(student, teacher, piece)
    return student.transform.backward(formula.gradient(log_s.exp(), log_s, log_t), logits)
