"""Divergences of two whole models, and log-probs of given tokens, over ragged batches.

What is expected comes from the models' own full logits, one sequence at a time, and from torch's `kl_div`.
"""

import math
from dataclasses import replace

import pytest
import torch
from fixtures.batches import make_batch, random_batch, sequences_of
from fixtures.models import CHAIN_S, family_model, random_model, table_model
from torch.nn.functional import kl_div, linear
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl.functional import divergence as divergence_module
from trl.functional import logps as logps_module
from trl.models.forward import supports_packing, token_divergences, token_logps
from trl.models.reference import frozen
from trl.types import RolloutBatch

# (student, teacher): both packed, one of them padded, both padded; with logits that are scaled or capped.
PAIRS = [("llama", "qwen2"), ("gemma2", "llama"), ("granite", "lfm2"), ("gpt2", "cohere"), ("lfm2", "gemma2")]
PADDED = ("gemma2", "lfm2")
LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]


def ragged() -> RolloutBatch:
    """Prompts shared by three, one and two sequences; completions of 0 to 9 tokens."""
    return random_batch([3, 1, 7], [4, 1, 6, 0, 1, 9], [0, 0, 1, 2, 2, 0])


def nothing(*prompts):
    """A batch of these prompts with completions of no token."""
    batch = make_batch(prompts, [[] for _ in prompts])
    return replace(batch, completion_ids=batch.completion_ids.long())


def model_of(family, seed):
    eager = {"attn_implementation": "eager"} if family == "gemma2" else {}
    return family_model(family, seed=seed, packed=True, **eager)


def full_logps(model, batch, temperature, vocabulary):
    """`[T, V]` from the model's own logits."""
    parts = []
    for prompt, completion in sequences_of(batch):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1, :vocabulary]
        parts.append((logits.float() / temperature).log_softmax(-1))
    return torch.cat(parts)


def plain(student, teacher, batch, beta, temperature=1.0):
    """Divergences and entropies `[T]`. `kl_div(q, p, log_target=True)` sums to KL(p || q)."""
    vocabulary = min(m.config.get_text_config().vocab_size for m in (student, teacher))
    log_s = full_logps(student, batch, temperature, vocabulary)
    with torch.no_grad():
        log_t = full_logps(teacher, batch, temperature, vocabulary)
    log_m = ((1 - beta) * log_s.exp() + beta * log_t.exp()).log()

    def kl(p, q):
        return kl_div(q, p, reduction="none", log_target=True).sum(-1)

    values = {0.0: lambda: kl(log_t, log_s), 1.0: lambda: kl(log_s, log_t)}.get(
        beta, lambda: beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
    )()
    return values, -(log_s.exp() * log_s).sum(-1).detach()


def with_gradients(student, computed):
    """Divergences, entropies, and the student's gradients of a mix of the divergences."""
    values, entropies = computed
    student.zero_grad()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return values.detach(), entropies, {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


def assert_same(found, expected, tolerance=2e-4):
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert found[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():
        scale = grad.abs().max().item()
        assert_close(found[2][name], grad, rtol=0, atol=tolerance * scale + 1e-6, msg=name)


# ---- divergences ----


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("student_family", "teacher_family"), PAIRS)
def test_models_of_two_families_are_compared_as_their_full_logits_are(student_family, teacher_family, beta):
    student, teacher = model_of(student_family, 0), frozen(model_of(teacher_family, 1))
    packed, teacher_packed = supports_packing(student), supports_packing(teacher)
    assert (packed, teacher_packed) == (student_family not in PADDED, teacher_family not in PADDED)
    found = token_divergences(
        student, teacher, ragged(), beta, temperature=0.7, packed=packed, teacher_packed=teacher_packed
    )
    found = with_gradients(student, found)
    # What is expected comes from models that nobody has prepared for anything.
    own_student, own_teacher = family_model(student_family, seed=0), family_model(teacher_family, seed=1)
    assert_same(found, with_gradients(own_student, plain(own_student, own_teacher, ragged(), beta, 0.7)))
    assert found[0].max() > 1e-2
    assert all(p.grad is None for p in teacher.parameters())


def test_all_layouts_of_the_two_models_give_the_same():
    student, teacher = random_model(packed=True), family_model("llama", seed=3, packed=True)
    results = [
        with_gradients(student, token_divergences(student, teacher, ragged(), 0.5, packed=p, teacher_packed=t))
        for p, t in LAYOUTS
    ]
    for other in results[1:]:
        assert_same(other, results[0], 1e-5)


def test_a_teacher_that_could_be_trained_gets_no_gradient_all_the_same():
    """Nor are its activations kept for one."""
    student, teacher = random_model(packed=True), random_model(seed=7, packed=True)
    graphs = []
    teacher.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: graphs.append(out.requires_grad))
    with_gradients(student, token_divergences(student, teacher, ragged(), 0.5))
    assert graphs == [False]
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
def test_equal_models_are_at_the_minimum(beta):
    student, teacher = random_model(packed=True), random_model(packed=True)
    values, _, gradients = with_gradients(student, token_divergences(student, teacher, ragged(), beta))
    assert values.max() < 1e-5
    assert max(g.abs().max() for g in gradients.values()) < 1e-4


@pytest.mark.parametrize(("sizes", "compared"), [((64, 70), 64), ((70, 64), 64), ((64, 64), 64)])
def test_ids_that_one_of_the_two_models_lacks_do_not_count(sizes, compared):
    student, teacher = random_model(packed=True, vocab_size=sizes[0]), random_model(seed=7, packed=True)
    if sizes[1] != 64:
        teacher = random_model(seed=7, packed=True, vocab_size=sizes[1])
    found = with_gradients(student, token_divergences(student, teacher, ragged(), 0.3))
    own = random_model(vocab_size=sizes[0])
    expected = with_gradients(own, plain(own, random_model(seed=7, vocab_size=sizes[1]), ragged(), 0.3))
    assert_same(found, expected)
    assert not found[2]["lm_head.weight"][compared:].any()


@pytest.mark.parametrize("packed", [True, False])
def test_completions_without_tokens_are_no_nan_and_a_zero_gradient(packed):
    student, teacher = random_model(packed=True), random_model(seed=7, packed=True)
    batch = nothing([10], [11, 12])
    values, entropies = token_divergences(student, teacher, batch, 0.5, packed=packed, teacher_packed=packed)
    assert values.shape == entropies.shape == (0,)
    values.sum().backward()
    assert student.lm_head.weight.grad is not None
    assert all(not p.grad.any() for p in student.parameters() if p.grad is not None)


def test_impossible_tokens_are_finite_where_the_divergence_is():
    """The teacher's -60 against the student's -60: both tables forbid almost everything after token 11."""
    student, teacher = table_model(CHAIN_S, packed=True), table_model({**CHAIN_S, 11: {12: 0.9, 13: 0.1}}, packed=True)
    batch = make_batch([[10]], [[11, 12, 1]])
    for beta, expected in ((0.0, 0.368064), (1.0, 0.510826)):
        values, _, gradients = with_gradients(student, token_divergences(student, teacher, batch, beta))
        assert values.tolist() == pytest.approx([0.0, expected, 0.0], abs=1e-6)
        assert all(g.isfinite().all() for g in gradients.values())


class _LastInputs:
    """What the LM head of a model was given last."""

    def __init__(self, model):
        model.get_output_embeddings().register_forward_pre_hook(self._take)

    def _take(self, module, inputs):
        self.hidden = inputs[0].detach()


@pytest.mark.parametrize("fp32_head", [True, False])
def test_the_heads_products_run_in_the_type_asked_for(fp32_head):
    """One padded sequence: all of the row from the prompt's last token on predicts the completion."""
    student, teacher = random_model().bfloat16(), random_model(seed=7).bfloat16()
    inputs = [_LastInputs(model) for model in (student, teacher)]
    batch = make_batch([[10, 20, 30]], [[11, 12, 13, 14, 15]])
    found, _ = token_divergences(student, teacher, batch, 0.0, packed=False, teacher_packed=False, fp32_head=fp32_head)
    logps = {
        wide: [
            linear(i.hidden[0, 2:].to(wide), m.lm_head.weight.to(wide)).float().log_softmax(-1)
            for i, m in zip(inputs, (student, teacher), strict=True)
        ]
        for wide in (torch.float32, torch.bfloat16)
    }
    precise, rounded = (kl_div(s, t, reduction="none", log_target=True).sum(-1) for s, t in logps.values())
    assert_close(found, precise if fp32_head else rounded, rtol=0, atol=2e-5)
    assert (precise - rounded).abs().max() > 2e-4


# ---- memory ----


class _Largest(TorchDispatchMode):
    """The most rows of logits that any operation makes."""

    def __init__(self, vocabulary, weight_rows):
        super().__init__()
        self.vocabulary, self.weight_rows, self.rows = vocabulary, weight_rows, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            # The transposed weight has the vocabulary in the last place too.
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == self.vocabulary:
                rows = x.numel() // self.vocabulary
                self.rows = max(self.rows, rows if rows != self.weight_rows else 0)
        return out


@pytest.mark.parametrize("what", ["divergences", "targets"])
@pytest.mark.parametrize("layout", [True, False])
def test_logits_of_all_tokens_never_exist(monkeypatch, what, layout):
    """40 tokens in chunks of 4; the hidden size is 32, so that 32 rows are the transposed head."""
    student, teacher = (random_model(seed=s, packed=True, vocab_size=67) for s in (0, 7))
    monkeypatch.setattr(logps_module, "CPU_CHUNK_ELEMENTS", 4 * 67 * (2 if what == "divergences" else 1))
    for module in (divergence_module, logps_module):
        monkeypatch.setattr(module, "KEPT_ELEMENTS", 0)
    batch = random_batch([3, 2], [20, 20], [0, 1])
    with _Largest(67, 32) as seen:
        if what == "divergences":
            values, _ = token_divergences(student, teacher, batch, 0.5, packed=layout, teacher_packed=layout)
        else:
            values = token_logps(student, batch, targets=batch.completion_ids[:, None], packed=layout).logps
        values.sum().backward()
    assert seen.rows == 4


def test_full_logits_would_be_seen():
    """The measure of the test above, on what it must not be."""
    model = random_model(vocab_size=67)
    with _Largest(67, 32) as seen:
        model(input_ids=torch.arange(10, 50)[None])
    assert seen.rows == 40


@pytest.mark.parametrize("kept", [0, 1 << 25])
def test_what_is_kept_for_the_backward_pass_changes_nothing(monkeypatch, kept):
    student, teacher = random_model(packed=True), random_model(seed=7, packed=True)
    expected = with_gradients(student, token_divergences(student, teacher, ragged(), 0.3))
    monkeypatch.setattr(logps_module, "CPU_CHUNK_ELEMENTS", 3 * 2 * 64)
    monkeypatch.setattr(divergence_module, "KEPT_ELEMENTS", kept)
    assert_same(with_gradients(student, token_divergences(student, teacher, ragged(), 0.3)), expected, 1e-5)


# ---- log-probs of given tokens ----


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_of_given_tokens_are_those_of_the_full_logits(packed):
    student, own, batch = random_model(packed=True), random_model(), ragged()
    targets = torch.randint(0, 64, (batch.num_tokens, 3), generator=torch.Generator().manual_seed(0))
    targets[:, 2] = targets[:, 0]  # the same token twice counts twice
    weights = torch.linspace(-1, 1, targets.numel()).view_as(targets)
    out = token_logps(student, batch, targets=targets, temperature=0.7, packed=packed)
    (out.logps * weights).sum().backward()
    log_p = full_logps(own, batch, 0.7, 64)
    (log_p.gather(1, targets) * weights).sum().backward()
    assert out.logps.shape == targets.shape
    assert_close(out.logps, log_p.gather(1, targets), rtol=1e-5, atol=1e-4)
    assert_close(out.entropies, -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-4)
    for (name, p), other in zip(student.named_parameters(), own.parameters(), strict=True):
        assert_close(p.grad, other.grad, rtol=0, atol=1e-4 * other.grad.abs().max().item() + 1e-6, msg=name)


def test_the_completions_own_tokens_are_the_default():
    model, batch = random_model(packed=True), ragged()
    own, given = token_logps(model, batch), token_logps(model, batch, targets=batch.completion_ids[:, None])
    assert_close(given.logps, own.logps[:, None], rtol=0, atol=0)


def test_all_tokens_of_the_vocabulary_sum_to_one():
    batch = ragged()
    out = token_logps(random_model(packed=True), batch, targets=torch.arange(64).expand(batch.num_tokens, 64))
    assert_close(out.logps.logsumexp(1), torch.zeros(batch.num_tokens), rtol=0, atol=1e-5)


def test_tokens_of_a_chain_have_its_probabilities():
    """After 10 comes 11, after 11 comes 12 or 13."""
    out = token_logps(
        table_model(CHAIN_S, packed=True), make_batch([[10]], [[11, 12]]), targets=torch.tensor([[11, 12], [13, 12]])
    )
    assert out.logps[0, 0].item() == pytest.approx(0.0, abs=1e-6)
    assert out.logps[0, 1].item() < -50
    assert out.logps[1].tolist() == pytest.approx([math.log(0.5)] * 2, abs=1e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_no_tokens_have_no_log_probs(packed):
    model = random_model(packed=True)
    out = token_logps(model, nothing([10]), targets=torch.empty(0, 3, dtype=torch.long), packed=packed)
    assert out.logps.shape == (0, 3)
    out.logps.sum().backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
