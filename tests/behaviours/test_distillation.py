"""What distillation minimises: the divergence asked for, in its direction, as the mean over the step's tokens.

Student and teacher are tables: after 10 the student goes to 11 or 12 with 1/2 each, the teacher with 0.9 and 0.1; both
end after either. So every completion has two tokens, and only the first has a divergence, the one of two coins.
"""

import math

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import random_model, table_model
from fixtures.online_methods import METHODS
from fixtures.runs import GradientGrabber, assert_same_gradients, logs, prompts
from torch.nn.functional import kl_div

from trl.types import Completion

ENDS = {11: {1: 1.0}, 12: {1: 1.0}}
STUDENT = {10: {11: 0.5, 12: 0.5}, **ENDS}
TEACHER = {10: {11: 0.9, 12: 0.1}, **ENDS}

# One coin each, (1/2, 1/2) and (0.9, 0.1):
#   forward: 0.9 log 1.8 + 0.1 log 0.2 = 0.529008 - 0.160944 = 0.368064
#   reverse: 0.5 log 5/9 + 0.5 log 5 = -0.293893 + 0.804719 = 0.510826
#   1/2, mixture (0.7, 0.3): teacher 0.9 log 9/7 + 0.1 log 1/3 = 0.116322, student 0.5 log 5/7 + 0.5 log 5/3 = 0.087177
#   0.1, mixture (0.54, 0.46): teacher 0.307137, student 0.003210; 0.1 and 0.9 of them
#   0.9, mixture (0.86, 0.14): teacher 0.007269, student 0.365321; 0.9 and 0.1 of them
# and half of each, because the second token has none.
LOSSES = {0.0: 0.184032, 1.0: 0.255413, 0.5: 0.050875, 0.1: 0.016801, 0.9: 0.021537}

# d/dz of the student's logit of 11, by beta: p_s - p_t = -0.4; p_s (log p_s/p_t - KL) = 0.5 (-0.587787 - 0.510826);
# (1 - beta) p_s (log p_s/m - KL(p_s || m)) = 0.5 * 0.5 (-0.336472 - 0.087177).
SLOPES = {0.0: -0.4, 1.0: -0.549306, 0.5: -0.105912}

LENGTHS = [1, 6, 2, 5, 3, 1, 4, 6]
EIGHT = [f"w{10 + i}" for i in range(8)]


def script(prompt, index):
    """A completion whose length is up to the prompt, 10 to 17."""
    length = LENGTHS[prompt[0] - 10]
    return [20 + (7 * prompt[0] + 3 * i) % 40 for i in range(length)]


def train(folder, student, teacher, dataset=None, engine=None, **changes):
    """A trainer that has done one step on eight prompts, and the gradients of that step."""
    grabber = GradientGrabber()
    args = METHODS["distillation"].make_config(folder, **{"max_grad_norm": 1e9, **changes})
    trainer = METHODS["distillation"].make(
        args, dataset or prompts(*["w10"] * 8), student, teacher_model=teacher, callbacks=[grabber]
    )
    if engine is not None:
        trainer.engine = engine
    trainer.train()
    return trainer, grabber.steps[-1]


def plain(student, teacher, beta, temperature=1.0):
    """Loss, entropy and gradients of the script's completions: one at a time, from full logits and `kl_div`."""
    values, entropies = [], []
    for token in range(10, 18):
        ids = torch.tensor([[token, *script([token], 0)]])
        log_s, log_t = ((m(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1) for m in (student, teacher))
        log_m = ((1 - beta) * log_s.exp() + beta * log_t.exp()).log()
        pairs = {0.0: [(1.0, log_t, log_s)], 1.0: [(1.0, log_s, log_t)]}.get(
            beta, [(beta, log_t, log_m), (1 - beta, log_s, log_m)]
        )
        values.append(sum(w * kl_div(q, p, reduction="none", log_target=True).sum(-1) for w, p, q in pairs))
        entropies.append(-(log_s.exp() * log_s).sum(-1))
    loss = torch.cat(values).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    return loss.item(), torch.cat(entropies).mean().item(), gradients


# ---- the numbers ----


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("beta", "expected"), LOSSES.items())
def test_the_loss_of_two_coins(tmp_path, beta, expected, packed):
    student, teacher = table_model(STUDENT), table_model(TEACHER)
    if not packed:
        for model in (student, teacher):
            model.set_attn_implementation("eager")
    trainer, _ = train(tmp_path, student, teacher, beta=beta)
    assert (trainer.packed, trainer.teacher_packed) == (packed, packed)
    assert logs(trainer, "loss") == [pytest.approx(expected, abs=2e-6)]
    # log 2 at the first token, 0 at the second.
    assert logs(trainer, "entropy") == [pytest.approx(math.log(2) / 2, abs=1e-5)]


@pytest.mark.parametrize(("beta", "slope"), SLOPES.items())
def test_the_gradient_of_two_coins(tmp_path, beta, slope):
    """The hidden state after 10 is 8 times its unit vector, and half of the tokens come after 10."""
    _, gradients = train(tmp_path, table_model(STUDENT), table_model(TEACHER), beta=beta)
    head = gradients["lm_head.weight"][:, 10]
    assert head[11].item() == pytest.approx(8 * slope / 2, abs=1e-5)
    assert head[12].item() == pytest.approx(-8 * slope / 2, abs=1e-5)
    others = [i for i in range(64) if i not in (11, 12)]
    assert head[others].abs().max() < 1e-5


@pytest.mark.parametrize("how", ["temperature", "generation_kwargs"])
def test_the_temperature_divides_the_logits_of_both(tmp_path, how):
    """(1/2, 1/2) stays; 0.9 : 0.1 becomes 9^(1/0.7) : 1."""
    ratio = 9 ** (1 / 0.7)
    p = ratio / (1 + ratio)
    changes = {"temperature": 0.7} if how == "temperature" else {"generation_kwargs": {"temperature": 0.7}}
    trainer, _ = train(tmp_path, table_model(STUDENT), table_model(TEACHER), **changes)
    reverse = 0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p))
    assert logs(trainer, "loss") == [pytest.approx(reverse / 2, abs=2e-6)]


def test_greedy_completions_are_compared_at_temperature_one(tmp_path):
    trainer, _ = train(tmp_path, table_model(STUDENT), table_model(TEACHER), temperature=0.0)
    assert logs(trainer, "loss") == [pytest.approx(LOSSES[1.0], abs=2e-6)]


def test_truncated_sampling_leaves_the_divergence_whole(tmp_path):
    trainer, _ = train(tmp_path, table_model(STUDENT), table_model(TEACHER), top_k=1, repetition_penalty=1.5)
    assert logs(trainer, "loss") == [pytest.approx(LOSSES[1.0], abs=2e-6)]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_equal_models_have_no_loss_and_no_gradient(tmp_path, beta):
    trainer, gradients = train(tmp_path, random_model(), random_model(), beta=beta)
    assert logs(trainer, "loss") == [pytest.approx(0.0, abs=1e-6)]
    assert max(g.abs().max().item() for g in gradients.values()) < 1e-4


# ---- the normaliser ----


@pytest.fixture(scope="module")
def expected():
    return {(b, t): plain(random_model(), random_model(seed=7), b, t) for b in (0.0, 0.5, 1.0) for t in (1.0, 0.7)}


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_every_cut_into_micro_steps_is_the_mean_over_all_tokens(tmp_path, batch, accumulation, beta, expected):
    loss, entropy, gradients = expected[beta, 1.0]
    trainer, found = train(
        tmp_path,
        random_model(),
        random_model(seed=7),
        prompts(*EIGHT),
        ScriptedEngine(script),
        beta=beta,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    assert logs(trainer, "loss") == [pytest.approx(loss, abs=1e-5)]
    assert logs(trainer, "entropy") == [pytest.approx(entropy, abs=1e-5)]
    assert_same_gradients(gradients, found)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    assert logs(trainer, "grad_norm") == [pytest.approx(norm, rel=1e-4)]


@pytest.mark.parametrize("budget", [1, 7, 12, 1000])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_token_budget_of_a_forward_pass_changes_nothing(tmp_path, budget, accumulation, expected):
    loss, entropy, gradients = expected[0.5, 0.7]
    trainer, found = train(
        tmp_path,
        random_model(),
        random_model(seed=7),
        prompts(*EIGHT),
        ScriptedEngine(script),
        beta=0.5,
        temperature=0.7,
        max_tokens_per_micro_batch=budget,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    assert logs(trainer, "loss") == [pytest.approx(loss, abs=1e-5)]
    assert logs(trainer, "entropy") == [pytest.approx(entropy, abs=1e-5)]
    assert_same_gradients(gradients, found)


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"cast_lm_head_to_fp32": True}])
def test_what_saves_memory_or_adds_precision_changes_nothing_in_float32(tmp_path, changes, expected):
    loss, _, gradients = expected[1.0, 1.0]
    trainer, found = train(
        tmp_path, random_model(), random_model(seed=7), prompts(*EIGHT), ScriptedEngine(script), **changes
    )
    assert logs(trainer, "loss") == [pytest.approx(loss, abs=1e-5)]
    assert_same_gradients(gradients, found)


# ---- completions of few tokens, or none ----


class _WithEmpty(ScriptedEngine):
    """An engine whose script may give completions without tokens."""

    def _next(self, prompt, sampling):
        ids = self.script(prompt, 0)
        return Completion(ids, [], "length" if not ids else "stop")


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("accumulation", [1, 8])
def test_completions_without_tokens_do_not_count(tmp_path, accumulation, budget):
    """Only the prompts 10 and 13 get one, of one token: the loss is the mean of the two coins, which are the same."""
    same = {token: TEACHER[10] for token in range(10, 18)} | {11: {1: 1.0}, 12: {1: 1.0}}
    coin = {token: STUDENT[10] for token in range(10, 18)} | {11: {1: 1.0}, 12: {1: 1.0}}
    trainer, gradients = train(
        tmp_path,
        table_model(coin),
        table_model(same),
        prompts(*EIGHT),
        _WithEmpty(lambda prompt, index: [11] if prompt[0] in (10, 13) else []),
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget,
    )
    assert logs(trainer, "loss") == [pytest.approx(2 * LOSSES[1.0], abs=2e-6)]
    assert logs(trainer, "completions/min_length") == [0.0]
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_without_any_token_is_a_zero_gradient(tmp_path, accumulation):
    trainer, gradients = train(
        tmp_path,
        random_model(),
        random_model(seed=7),
        prompts(*EIGHT),
        _WithEmpty(lambda prompt, index: []),
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    assert logs(trainer, "loss") == [0.0]
    assert logs(trainer, "grad_norm") == [0.0]
    assert not any(g.any() for g in gradients.values())
    assert trainer.state.log_history[0]["entropy"] is None
