"""Divergences of student and teacher: closed forms, full logits, gradients, and the few log-probs of a server."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl.functional import divergence as divergence_module
from trl.functional.divergence import Head, divergences, support_divergence
from trl.functional.logps import LogitTransform, chosen_logps

T = 4
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TRANSFORMS = {
    "plain": (LogitTransform(), LogitTransform()),
    "temperature": (LogitTransform(temperature=0.7), LogitTransform(temperature=2.0)),
    "all": (LogitTransform(scale=1.3, softcap=2.0, temperature=0.6), LogitTransform(softcap=3.0)),
}

# Student (1/2, 1/2), teacher (0.9, 0.1):
#   forward: 0.9 log 1.8 + 0.1 log 0.2 = 0.529008 - 0.160944
#   reverse: 0.5 log 5/9 + 0.5 log 5 = -0.293893 + 0.804719
#   1/2, mixture (0.7, 0.3): teacher 0.9 log 9/7 + 0.1 log 1/3 = 0.226183 - 0.109861 = 0.116322,
#        student 0.5 log 5/7 + 0.5 log 5/3 = -0.168236 + 0.255413 = 0.087177, and half of each
#   0.1, mixture (0.54, 0.46): teacher 0.9 log 5/3 + 0.1 log 5/23 = 0.459743 - 0.152606 = 0.307137,
#        student 0.5 log 25/27 + 0.5 log 25/23 = -0.038481 + 0.041691 = 0.003210; 0.1 and 0.9 of them
#   0.9, mixture (0.86, 0.14): teacher 0.9 log 45/43 + 0.1 log 5/7 = 0.040916 - 0.033647 = 0.007269,
#        student 0.5 log 25/43 + 0.5 log 25/7 = -0.271162 + 0.636483 = 0.365321; 0.9 and 0.1 of them
COIN = {0.0: 0.368064, 1.0: 0.510826, 0.5: 0.101749, 0.1: 0.033603, 0.9: 0.043074}
STUDENT_COIN, TEACHER_COIN = [0.5, 0.5], [0.9, 0.1]


def head_of(*distributions, dtype=torch.float64):
    """A head whose token i has the distribution i: one-hot hidden states pick a column of the weights."""
    return Head(torch.eye(len(distributions), dtype=dtype), torch.tensor(distributions, dtype=dtype).log().T)


def heads(
    student_size=(3, 6), teacher_size=(2, 6), with_bias=True, transforms=TRANSFORMS["plain"], dtype=torch.float64
):
    """Random student and teacher of sizes (H, V); the student's tensors ask for gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    student, teacher = (
        Head(random(T, h), random(v, h), random(v) if with_bias else None, transform)
        for (h, v), transform in zip((student_size, teacher_size), transforms, strict=True)
    )
    for tensor in tensors_of(student):
        tensor.requires_grad_()
    return student, teacher


def tensors_of(head):
    return [x for x in (head.hidden, head.weight, head.bias) if x is not None]


def with_tensors(head, hidden, weight, bias=None):
    return replace(head, hidden=hidden, weight=weight, bias=bias)


def full_probabilities(head, vocabulary):
    logits = head.hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits * head.transform.scale
    if head.transform.softcap is not None:
        logits = head.transform.softcap * torch.tanh(logits / head.transform.softcap)
    return (logits[:, :vocabulary] / head.transform.temperature).softmax(1)


def from_probabilities(p_s, p_t, beta):
    def kl(p, q):
        return (p * (p / q).log()).sum(1)

    if beta in (0.0, 1.0):
        return kl(p_t, p_s) if beta == 0.0 else kl(p_s, p_t)
    mixture = (1 - beta) * p_s + beta * p_t
    return beta * kl(p_t, mixture) + (1 - beta) * kl(p_s, mixture)


def from_full_logits(student, teacher, beta):
    vocabulary = min(len(student.weight), len(teacher.weight))
    p_s, p_t = full_probabilities(student, vocabulary), full_probabilities(teacher, vocabulary).detach()
    return from_probabilities(p_s, p_t, beta), -(p_s * p_s.log()).sum(1).detach()


@pytest.fixture(params=["kept", "recomputed"])
def path(request, monkeypatch):
    """Whether the backward pass finds the logits' gradient, or computes it again."""
    monkeypatch.setattr(divergence_module, "KEPT_ELEMENTS", 1 << 24 if request.param == "kept" else 0)
    return request.param


@pytest.mark.parametrize(("beta", "expected"), COIN.items())
def test_closed_form(beta, expected):
    # The second token is the same for both.
    student, teacher = head_of(STUDENT_COIN, [0.25, 0.75]), head_of(TEACHER_COIN, [0.25, 0.75])
    divergence, entropy = divergences(student, teacher, beta)
    assert divergence.tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    assert entropy[0].item() == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # p_s - p_t = 0.5 - 0.9.
        (0.0, -0.4),
        # 0.5 (log 5/9 - 0.510826) = 0.5 (-0.587787 - 0.510826).
        (1.0, -0.549306),
        # 0.5 * 0.5 (log 5/7 - 0.087177) = 0.25 (-0.336472 - 0.087177).
        (0.5, -0.105912),
        # 0.9 * 0.5 (log 25/27 - 0.003210) = 0.45 (-0.076961 - 0.003210).
        (0.1, -0.036077),
    ],
)
def test_closed_form_of_the_gradient(beta, expected, path):
    student, teacher = head_of(STUDENT_COIN), head_of(TEACHER_COIN)
    student.weight.requires_grad_()
    divergences(student, teacher, beta)[0].sum().backward()
    # The hidden state is 1, so the weight's gradient is the logits'.
    assert student.weight.grad.flatten().tolist() == pytest.approx([expected, -expected], abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_identical_models_have_no_divergence_and_no_gradient(beta, dtype, path):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    student, _ = heads(dtype=dtype)
    divergence, _ = divergences(student, with_tensors(student, *tensors_of(student)), beta)
    assert (divergence >= 0).all()
    assert divergence.max() <= tolerance
    divergence.sum().backward()
    for tensor in tensors_of(student):
        assert tensor.grad.abs().max() <= tolerance


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("sizes", [((3, 6), (2, 6)), ((3, 6), (3, 9)), ((2, 9), (3, 6))], ids=["same", "more", "less"])
@pytest.mark.parametrize("beta", BETAS)
def test_equals_full_logits(transforms, with_bias, sizes, beta, path):
    student, teacher = heads(*sizes, with_bias, transforms)
    got = divergences(student, teacher, beta, chunk_elements=3 * 2 * 6)
    expected = from_full_logits(student, teacher, beta)
    assert_close(got, expected)
    weights = torch.linspace(-1, 2, T).double()
    grads = [torch.autograd.grad((weights * x[0]).sum(), tensors_of(student)) for x in (got, expected)]
    assert_close(grads[0], grads[1])


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_gradients(transforms, with_bias, beta, path):
    student, teacher = heads((3, 6), (2, 8), with_bias, transforms)
    tensors = tensors_of(student)
    assert gradcheck(
        lambda *xs: divergences(with_tensors(student, *xs), teacher, beta, chunk_elements=3 * 2 * 6)[0], tensors
    )


@pytest.mark.parametrize("beta", BETAS)
def test_chunks_do_not_change_anything(beta, path):
    results = []
    for tokens in (1, 3, 100):
        student, teacher = heads(transforms=TRANSFORMS["all"])
        divergence, entropy = divergences(student, teacher, beta, chunk_elements=tokens * 2 * 6)
        divergence.sum().backward()
        results.append([divergence, entropy, *(x.grad for x in tensors_of(student))])
    for other in results[1:]:
        assert_close(other, results[0], rtol=0, atol=1e-12)


def test_the_entropy_is_that_of_the_log_probs_and_has_no_gradient():
    student, teacher = heads(transforms=TRANSFORMS["all"])
    _, entropy = divergences(student, teacher, 0.5)
    _, expected = chosen_logps(
        student.hidden, student.weight, torch.zeros(T).long(), bias=student.bias, transform=student.transform
    )
    assert_close(entropy, expected)
    assert not entropy.requires_grad


def test_rows_beyond_the_shared_vocabulary_get_no_gradient(path):
    student, teacher = heads((3, 9), (2, 6))
    divergences(student, teacher, 0.5)[0].sum().backward()
    assert (student.weight.grad[6:] == 0).all()
    assert (student.bias.grad[6:] == 0).all()
    assert (student.weight.grad[:6] != 0).all()


def test_a_teacher_with_the_students_own_tensors_gets_no_gradient(path):
    student, teacher = heads()
    teacher = replace(teacher, hidden=student.hidden, weight=student.weight)
    divergences(student, teacher, 0.5)[0].sum().backward()
    alone, frozen = heads()
    frozen = replace(frozen, hidden=alone.hidden.detach().clone(), weight=alone.weight.detach().clone())
    divergences(alone, frozen, 0.5)[0].sum().backward()
    assert_close([x.grad for x in tensors_of(student)], [x.grad for x in tensors_of(alone)])


def test_only_what_asks_for_a_gradient_gets_one(path):
    student, teacher = heads()
    frozen = replace(student, weight=student.weight.detach(), bias=student.bias.detach())
    divergences(frozen, teacher, 1.0)[0].sum().backward()
    expected = torch.autograd.grad(from_full_logits(student, teacher, 1.0)[0].sum(), student.hidden)
    assert_close(student.hidden.grad, expected[0])
    assert not divergences(with_tensors(student, *(x.detach() for x in tensors_of(student))), teacher, 1.0)[
        0
    ].requires_grad


@pytest.mark.parametrize("beta", BETAS)
def test_extreme_logits(beta, path):
    # Student and teacher are certain of different tokens: log-probs 0, -1e4 and -2e4. Both KLs are 2e4. Of the mixture
    # 1 - beta is the student's token and beta the teacher's: the divergence is the entropy of (beta, 1 - beta).
    student = Head(torch.ones(1, 1), torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True))
    teacher = Head(torch.ones(1, 1), torch.tensor([[-1e4], [1e4], [0.0]]))
    divergence, entropy = divergences(student, teacher, beta)
    interior = -(beta * math.log(beta) + (1 - beta) * math.log(1 - beta)) if 0 < beta < 1 else None
    assert divergence.item() == pytest.approx(interior or 2e4, rel=1e-6)
    assert entropy.item() == 0
    divergence.sum().backward()
    # p_s - p_t = (1, -1, 0) for the forward KL; elsewhere p_s is 0 or log p_s/q is the KL itself.
    assert_close(student.weight.grad, torch.tensor([[1.0], [-1.0], [0.0]]) if beta == 0 else torch.zeros(3, 1))


@pytest.mark.parametrize("beta", BETAS)
def test_ids_that_both_exclude_do_not_count(beta, path):
    excluded = torch.tensor([0.0, 0.0, -math.inf]).double()
    student = replace(head_of([*STUDENT_COIN, 1.0]), bias=excluded)
    teacher = replace(head_of([*TEACHER_COIN, 1.0]), bias=excluded)
    student.weight.requires_grad_()
    divergence, entropy = divergences(student, teacher, beta)
    assert divergence.item() == pytest.approx(COIN[beta], abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    divergence.sum().backward()
    assert student.weight.grad.isfinite().all()
    assert student.weight.grad[2] == 0


@pytest.mark.parametrize(
    ("beta", "expected"),
    # Student (0.4, 0.4, 0.2), teacher (0.9, 0.1, 0).
    [
        # 0.9 log 9/4 + 0.1 log 1/4 = 0.729837 - 0.138629
        (0.0, 0.591208),
        # Mixture (0.65, 0.25, 0.1): teacher 0.9 log 18/13 + 0.1 log 2/5 = 0.292880 - 0.091629 = 0.201251,
        # student 0.4 log 8/13 + 0.4 log 8/5 + 0.2 log 2 = -0.194203 + 0.188001 + 0.138629 = 0.132427; half of each
        (0.5, 0.166839),
        (1.0, math.inf),
    ],
)
def test_an_id_that_only_the_teacher_excludes(beta, expected, path):
    student = head_of([0.4, 0.4, 0.2])
    student.weight.requires_grad_()
    teacher = replace(head_of([*TEACHER_COIN, 1.0]), bias=torch.tensor([0.0, 0.0, -math.inf]).double())
    divergence, _ = divergences(student, teacher, beta)
    assert divergence.item() == pytest.approx(expected, abs=1e-6)
    if math.isfinite(expected):
        divergence.sum().backward()
        assert student.weight.grad.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
def test_half_precision_sums_in_float32(beta, path):
    # The logits are rounded by the product; everything after it is exact. Close models: no divergence below 0.
    student, teacher = heads((8, 40), (8, 40), with_bias=False, dtype=torch.bfloat16)
    teacher = replace(teacher, hidden=student.hidden.detach(), weight=(student.weight * 1.01).detach())
    divergence, entropy = divergences(student, teacher, beta)
    assert divergence.dtype == entropy.dtype == torch.float32
    p_s, p_t = ((h.hidden @ h.weight.T).detach().double().softmax(1) for h in (student, teacher))
    assert_close(divergence.double(), from_probabilities(p_s, p_t, beta), rtol=1e-4, atol=1e-6)
    assert (divergence >= 0).all()
    divergence.sum().backward()
    assert student.hidden.grad.dtype == student.weight.grad.dtype == torch.bfloat16


def test_types_may_differ_and_products_run_in_the_type_asked_for(path):
    student, teacher = heads(dtype=torch.bfloat16)
    got, _ = divergences(
        replace(student, compute_dtype=torch.float32), replace(teacher, compute_dtype=torch.float64), 0.5
    )
    exact = [with_tensors(h, *(x.detach().double() for x in tensors_of(h))) for h in (student, teacher)]
    assert got.dtype == torch.float32
    assert_close(got.double(), divergences(*exact, 0.5)[0], rtol=0, atol=1e-6)
    got.sum().backward()
    assert student.weight.grad.dtype == torch.bfloat16


def test_no_token_at_all():
    student, teacher = heads()
    empty = [replace(h, hidden=h.hidden[:0]) for h in (student, teacher)]
    divergence, entropy = divergences(*empty, 0.5)
    assert divergence.shape == entropy.shape == (0,)
    divergence.sum().backward()
    assert (student.weight.grad == 0).all()


def test_inputs_are_left_alone(path):
    student, teacher = heads(transforms=TRANSFORMS["all"])
    before = [x.clone() for h in (student, teacher) for x in tensors_of(h)]
    divergence, _ = divergences(student, teacher, 0.5)
    divergence.sum().backward(retain_graph=True)
    first = student.weight.grad.clone()
    divergence.sum().backward()
    assert_close([x for h in (student, teacher) for x in tensors_of(h)], before, rtol=0, atol=0)
    assert_close(student.weight.grad, 2 * first, rtol=0, atol=0)


class LargestResult(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(result) if torch.is_tensor(x)), 0)
        return result


@pytest.mark.parametrize("beta", BETAS)
def test_logits_never_exist_for_more_than_a_chunk(beta, monkeypatch):
    monkeypatch.setattr(divergence_module, "KEPT_ELEMENTS", 0)
    tokens, vocabulary, chunk = 64, 50, 4
    student = Head(torch.randn(tokens, 2, requires_grad=True), torch.randn(vocabulary, 2, requires_grad=True))
    teacher = Head(torch.randn(tokens, 3), torch.randn(vocabulary, 3))
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with hooks, LargestResult() as largest:
        divergences(student, teacher, beta, chunk_elements=chunk * 2 * vocabulary)[0].sum().backward()
    assert max(saved) == max(x.numel() for h in (student, teacher) for x in tensors_of(h))
    assert largest.elements == chunk * vocabulary < tokens * vocabulary


# Of a support of two ids and the rest, student (0.5, 0.2 | 0.3) and teacher (0.6, 0.3 | 0.1):
#   forward: 0.6 log 6/5 + 0.3 log 3/2 = 0.109393 + 0.121640, rest 0.1 log 1/3 = -0.109861
#   reverse: 0.5 log 5/6 + 0.2 log 2/3 = -0.091161 - 0.081093, rest 0.3 log 3 = 0.329584
#   1/2, mixture (0.55, 0.25 | 0.2): teacher 0.6 log 12/11 + 0.3 log 6/5 = 0.052207 + 0.054696, rest 0.1 log 1/2
#        = -0.069315; student 0.5 log 10/11 + 0.2 log 4/5 = -0.047655 - 0.044629, rest 0.3 log 3/2 = 0.121640
STUDENT_SUPPORT, TEACHER_SUPPORT = (torch.tensor([p]).double().log() for p in ([0.5, 0.2], [0.6, 0.3]))
SUPPORT = {0.0: (0.231033, 0.121171), 1.0: (-0.172254, 0.157330), 0.5: (0.007310, 0.033472)}


@pytest.mark.parametrize(("beta", "expected"), SUPPORT.items())
def test_support_by_hand(beta, expected):
    for add_tail, value in zip((False, True), expected, strict=True):
        got = support_divergence(STUDENT_SUPPORT, TEACHER_SUPPORT, beta, add_tail=add_tail)
        assert got.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("add_tail", [True, False])
def test_gradients_of_the_support(beta, add_tail):
    student, teacher = heads()
    ids = torch.tensor([[0, 3], [5, 1], [2, 4], [1, 0]])
    log_s = full_probabilities(student, 6).detach().log().gather(1, ids).requires_grad_()
    log_t = full_probabilities(teacher, 6).log().gather(1, ids).requires_grad_()
    assert gradcheck(lambda x: support_divergence(x, log_t, beta, add_tail=add_tail), log_s)
    support_divergence(log_s, log_t, beta, add_tail=add_tail).sum().backward()
    assert log_s.grad is not None
    assert log_t.grad is None


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("add_tail", [True, False])
def test_a_support_of_the_whole_vocabulary_gives_the_whole_divergence(beta, add_tail):
    # Through log-probs, the gradient that reaches hidden states and head is the whole one as well.
    student, teacher = heads()
    ids = torch.arange(6).expand(T, 6)
    log_s, log_t = (chosen_logps(h.hidden, h.weight, ids, bias=h.bias)[0] for h in (student, teacher))
    got = support_divergence(log_s, log_t, beta, add_tail=add_tail)
    expected, _ = divergences(student, teacher, beta)
    assert_close(got, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(x.sum(), tensors_of(student)) for x in (got, expected)]
    assert_close(grads[0], grads[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_a_support_with_the_rest_is_a_lower_bound(beta):
    student, teacher = heads()
    log_s, log_t = (full_probabilities(h, 6).log() for h in (student, teacher))
    bounds = [support_divergence(log_s[:, :k], log_t[:, :k], beta, add_tail=True) for k in (1, 2, 3, 4, 5)]
    bounds.append(divergences(student, teacher, beta)[0])
    assert (bounds[0] >= 0).all()
    for coarse, fine in pairwise(bounds):
        assert (fine >= coarse - 1e-12).all()
    # A rest of one id is that id.
    assert_close(bounds[4], bounds[5])


@pytest.mark.parametrize(("beta", "expected"), COIN.items())
def test_one_id_and_the_rest_are_a_coin(beta, expected):
    log_s, log_t = (torch.tensor([[p]]).double().log() for p in (0.5, 0.9))
    assert support_divergence(log_s, log_t, beta, add_tail=True).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("beta", "expected"), SUPPORT.items())
@pytest.mark.parametrize("filler", [0.0, -math.inf, math.nan])
def test_invalid_places_do_not_count(beta, expected, filler):
    # The first token has a filler in the middle, the second nothing at all.
    valid = torch.tensor([[True, False, True], [False, False, False]])
    fillers = torch.full((2, 3), filler).double()
    log_s, log_t = (
        fillers.masked_scatter(valid, x.flatten()).requires_grad_() for x in (STUDENT_SUPPORT, TEACHER_SUPPORT)
    )
    for add_tail, value in zip((False, True), expected, strict=True):
        got = support_divergence(log_s, log_t, beta, add_tail=add_tail, valid=valid)
        assert got.tolist() == pytest.approx([value, 0.0], abs=1e-6)
        (grad,) = torch.autograd.grad(got.sum(), log_s)
        assert grad.isfinite().all()
        assert (grad[~valid] == 0).all()
        assert (grad[0, [0, 2]] != 0).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("student", "teacher"),
    [([0.5, 0.5], [0.9, 0.1]), ([0.5, 0.2], [0.9, 0.1]), ([0.5, 0.5], [0.6, 0.3]), ([0.6, 0.41], [0.7, 0.31])],
    ids=["both", "teacher", "student", "more than 1"],
)
def test_sums_that_reach_one(beta, dtype, student, teacher):
    log_s, log_t = (torch.tensor([p], dtype=dtype).log() for p in (student, teacher))
    log_s.requires_grad_()
    with_rest = support_divergence(log_s, log_t, beta, add_tail=True)
    (grad,) = torch.autograd.grad(with_rest.sum(), log_s)
    assert with_rest.isfinite().all()
    assert grad.isfinite().all()
    if sum(student) >= 1 and sum(teacher) >= 1:
        # Nothing is left for the rest, on either side.
        assert_close(with_rest, support_divergence(log_s, log_t, beta, add_tail=False), rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_impossible_ids_of_a_support(beta):
    # The last id is impossible for both, as ids outside of a server's top-p are: the coin is left.
    log_s, log_t = (torch.tensor([[*p, 0.0]]).double().log() for p in (STUDENT_COIN, TEACHER_COIN))
    log_s.requires_grad_()
    got = support_divergence(log_s, log_t, beta, add_tail=False)
    assert got.item() == pytest.approx(COIN[beta], abs=1e-6)
    got.sum().backward()
    assert log_s.grad.isfinite().all()


def test_support_in_half_precision_sums_in_float32():
    log_s, log_t = STUDENT_SUPPORT.bfloat16(), TEACHER_SUPPORT.bfloat16()
    got = support_divergence(log_s, log_t, 1.0, add_tail=True)
    assert got.dtype == torch.float32
    assert_close(got, support_divergence(log_s.double(), log_t.double(), 1.0, add_tail=True).float())


@pytest.mark.parametrize("beta", [-0.1, 1.5])
def test_a_beta_out_of_range_is_refused(beta):
    student, teacher = heads()
    with pytest.raises(AssertionError, match=f"got {beta}"):
        divergences(student, teacher, beta)
    with pytest.raises(AssertionError, match=f"got {beta}"):
        support_divergence(STUDENT_SUPPORT, TEACHER_SUPPORT, beta, add_tail=True)
