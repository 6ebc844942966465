"""Log-probs and entropies from hidden states and head: closed forms, full logits, and gradients."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from trl.functional import logps as logps_module
from trl.functional.logps import LogitTransform, chosen_logps

T, H, V = 4, 2, 5
TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(softcap=1.5),
    "all": LogitTransform(scale=1.3, softcap=2.0, temperature=0.6),
}


def inputs(dtype=torch.float64, with_bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64) if with_bias else None
    targets = torch.randint(V, (T,), generator=generator)
    tensors = [None if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return *tensors, targets


def from_full_logits(hidden, weight, bias, targets, transform):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = (logits / transform.temperature).log_softmax(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


@pytest.fixture(params=["kept", "recomputed"])
def path(request, monkeypatch):
    """Whether the backward pass finds probabilities, or computes them again."""
    monkeypatch.setattr(logps_module, "KEPT_ELEMENTS", 1 << 24 if request.param == "kept" else 0)
    return request.param


@pytest.mark.parametrize(
    ("temperature", "share", "entropies"),
    # (3/4, 1/4) at temperature 1; squares renormalised at 1/2: (0.9, 0.1). Twice the entropy: 0.562335 + 0.562335 = …
    [(1.0, 0.75, 0.562335), (0.5, 0.9, 0.325083)],
)
def test_closed_form(temperature, share, entropies):
    weight = torch.tensor([[0.75], [0.25]]).double().log()
    got = chosen_logps(
        torch.ones(2, 1).double(), weight, torch.tensor([0, 1]), transform=LogitTransform(temperature=temperature)
    )
    assert_close(got[0], torch.tensor([share, 1 - share]).double().log())
    exact = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert exact == pytest.approx(entropies, abs=1e-6)
    assert_close(got[1], torch.full((2,), exact).double())


def test_a_certain_token_has_log_prob_and_entropy_zero():
    weight = torch.tensor([[0.0], [-60.0], [-60.0]])
    logp, entropy = chosen_logps(torch.ones(1, 1), weight, torch.tensor([0]))
    assert logp.item() == 0.0
    assert 0 <= entropy.item() < 1e-20


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_equals_full_logits(transform, with_bias, chunk, path):
    *tensors, targets = inputs(with_bias=with_bias)
    hidden, weight, bias = tensors
    got = chosen_logps(hidden, weight, targets, bias=bias, transform=transform, chunk_elements=chunk * V)
    expected = from_full_logits(hidden, weight, bias, targets, transform)
    assert_close(got, expected)
    wanted = [t for t in tensors if t is not None]
    mix = torch.linspace(-1, 2, T).double()
    for parts in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.5)):
        grads = [
            torch.autograd.grad(sum(c * (mix * x).sum() for c, x in zip(parts, pair, strict=True) if c), wanted,
                                retain_graph=True)
            for pair in (got, expected)
        ]  # fmt: skip
        assert_close(grads[0], grads[1])


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("outputs", ["logps", "both"])
def test_gradients(transform, with_bias, chunk, outputs, path):
    hidden, weight, bias, targets = inputs(with_bias=with_bias)

    def f(*tensors):
        h, w, b = tensors if with_bias else (*tensors, None)
        both = chosen_logps(h, w, targets, bias=b, transform=transform, chunk_elements=chunk * V)
        return both if outputs == "both" else both[0]

    assert gradcheck(f, (hidden, weight, bias) if with_bias else (hidden, weight))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_several_targets_equal_full_logits(transform, chunk, path):
    # The last position asks for one id twice.
    several = torch.tensor([[0, 3, 1], [4, 2, 0], [1, 0, 4], [2, 3, 2]])
    *tensors, _ = inputs()
    hidden, weight, bias = tensors
    got = chosen_logps(hidden, weight, several, bias=bias, transform=transform, chunk_elements=chunk * V)
    columns = [from_full_logits(hidden, weight, bias, y, transform) for y in several.T]
    expected = torch.stack([logp for logp, _ in columns], dim=1), columns[0][1]
    assert_close(got, expected)
    mix = torch.linspace(-1, 2, 3 * T).double().view(T, 3)
    for parts in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.5)):
        grads = [
            torch.autograd.grad(parts[0] * (mix * logp).sum() + parts[1] * entropy.sum(), tensors, retain_graph=True)
            for logp, entropy in (got, expected)
        ]
        assert_close(grads[0], grads[1])


def test_gradients_of_several_targets(path):
    hidden, weight, bias, _ = inputs()
    several = torch.tensor([[0, 3], [4, 2], [1, 0], [2, 2]])
    assert gradcheck(lambda h, w, b: chosen_logps(h, w, several, bias=b, chunk_elements=3 * V), (hidden, weight, bias))


def test_one_column_of_targets_is_the_flat_call(path):
    results = []
    for column in (False, True):
        hidden, weight, bias, targets = inputs(torch.float32)
        logp, entropy = chosen_logps(hidden, weight, targets[:, None] if column else targets, bias=bias)
        assert logp.shape == ((T, 1) if column else (T,))
        logp.sum().backward()
        results.append([logp.flatten(), entropy, hidden.grad, weight.grad, bias.grad])
    assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_frozen_head_gets_no_gradient(path):
    hidden, weight, bias, targets = inputs()
    logp, _ = chosen_logps(hidden, weight.detach(), targets, bias=bias.detach())
    logp.sum().backward()
    assert hidden.grad is not None
    hidden, weight, bias, targets = inputs()
    logp, _ = chosen_logps(hidden.detach(), weight, targets, bias=bias.detach())
    logp.sum().backward()
    expected = inputs()
    from_full_logits(expected[0], expected[1], expected[2], targets, LogitTransform())[0].sum().backward()
    assert_close(weight.grad, expected[1].grad)
    assert bias.grad is None


def test_no_token_at_all():
    hidden, weight, _, targets = inputs()
    logp, entropy = chosen_logps(hidden[:0], weight, targets[:0])
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert (weight.grad == 0).all()


def test_inputs_are_left_alone():
    hidden, weight, bias, targets = inputs()
    before = [x.clone() for x in (hidden, weight, bias)]
    logp, entropy = chosen_logps(hidden, weight, targets, bias=bias, transform=TRANSFORMS["all"])
    (logp.sum() + entropy.sum()).backward()
    assert_close([hidden, weight, bias], before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniform_distribution_in_half_precision(dtype):
    logp, entropy = chosen_logps(torch.randn(9, 64).to(dtype), torch.zeros(64, 64, dtype=dtype), torch.arange(9))
    assert logp.dtype == entropy.dtype == torch.float32
    assert_close(logp, torch.full((9,), -math.log(64)), rtol=0, atol=1e-5)
    assert_close(entropy, torch.full((9,), math.log(64)), rtol=0, atol=1e-5)


def test_half_precision_sums_in_float32(path):
    # The logits are rounded by the product; everything after it is exact.
    hidden, weight, _, targets = inputs(torch.bfloat16, with_bias=False)
    logits = (hidden @ weight.T).detach().double()
    logp, entropy = chosen_logps(hidden, weight, targets)
    log_p = logits.log_softmax(1)
    assert_close(logp.double(), log_p.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=1e-6)
    assert_close(entropy.double(), -(log_p.exp() * log_p).sum(1), rtol=0, atol=1e-6)
    logp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_chunks_do_not_move_half_precision_values():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 32, generator=generator).bfloat16()
    weight = torch.randn(300, 32, generator=generator).bfloat16()
    targets = torch.randint(300, (50,), generator=generator)
    whole = chosen_logps(hidden, weight, targets)
    for chunk in (1, 7, 32):
        assert_close(chosen_logps(hidden, weight, targets, chunk_elements=chunk * 300), whole, rtol=0, atol=1e-3)


def test_the_product_runs_in_the_type_asked_for():
    hidden, weight, _, targets = inputs(torch.bfloat16, with_bias=False)
    got = chosen_logps(hidden, weight, targets, compute_dtype=torch.float32)
    expected = from_full_logits(hidden.float(), weight.float(), None, targets, LogitTransform())
    assert_close(got, expected)


def test_a_deep_chunk_of_a_large_gradient_sums_in_float32(path):
    # 512 equal tokens, each adding the same to the head's gradient: bf16 sums would stop growing at 256 terms.
    tokens = 512
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = chosen_logps(hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk_elements=2)
    logp.sum().backward()
    assert_close(weight.grad.float(), torch.tensor([[tokens / 2], [-tokens / 2]]))
