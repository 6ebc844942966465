"""What distillation minimises: the divergence asked for, in its direction, as the mean over the step's tokens.

Student and teacher are tables: after 10 the student goes to 11 or 12 with 1/2 each, the teacher with 0.9 and 0.1; both
end after either. So every completion has two tokens, and only the first has a divergence, the one of two coins.
"""

import math

import pyarrow.parquet
import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import family_model, random_model, table_model
from fixtures.online_methods import METHODS
from fixtures.runs import GradientGrabber, assert_same_gradients, logs, prompts
from torch.nn.functional import kl_div

from trl.errors import DataError
from trl.models.load import disable_dropout
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


@pytest.mark.parametrize(
    ("one", "other", "packed"), [("gemma2", "llama", (False, True)), ("gpt2", "lfm2", (True, False))]
)
def test_models_of_two_families_one_of_which_cannot_be_packed(tmp_path, one, other, packed):
    def fresh():
        return family_model(one), family_model(other, seed=7)

    student, teacher = fresh()
    disable_dropout(student)
    loss, _, gradients = plain(*fresh(), 0.5, 0.7)
    trainer, found = train(
        tmp_path, student, teacher, prompts(*EIGHT), ScriptedEngine(script), beta=0.5, temperature=0.7
    )
    assert (trainer.packed, trainer.teacher_packed) == packed
    assert logs(trainer, "loss") == [pytest.approx(loss, rel=1e-4)]
    assert_same_gradients(gradients, found, 1e-3)


# ---- completions of few tokens, or none ----


class _WithEmpty(ScriptedEngine):
    """An engine whose script may give completions without tokens."""

    def _next(self, prompt, sampling):
        ids = self.script(prompt, 0)
        return Completion(ids, [], "length" if not ids else "stop")


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("accumulation", [1, 8])
def test_completions_without_tokens_do_not_count(tmp_path, accumulation, budget):
    """The same coins after any prompt; of eight completions two have a token, and the loss is the mean of these."""
    student, teacher = (dict.fromkeys(range(10, 18), coins[10]) | ENDS for coins in (STUDENT, TEACHER))
    trainer, gradients = train(
        tmp_path,
        table_model(student),
        table_model(teacher),
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


# ---- when the student writes ----


def run(folder, dataset, engine=None, student=None, **changes):
    """A trainer of random models that has trained as long as the changes say."""
    args = METHODS["distillation"].make_config(folder, **changes)
    trainer = METHODS["distillation"].make(args, dataset, student or random_model())
    if engine is not None:
        trainer.engine = engine
    trainer.train()
    return trainer


@pytest.mark.parametrize(("batch", "accumulation", "steps"), [(2, 2, 2), (8, 1, 1), (1, 2, 4), (3, 1, 2)])
def test_one_round_of_completions_a_step_and_one_completion_a_prompt(tmp_path, batch, accumulation, steps):
    """Eight prompts, three epochs; a last step that would not be full is left out."""
    engine = ScriptedEngine(script)
    trainer = run(
        tmp_path,
        prompts(*EIGHT),
        engine,
        max_steps=-1,
        num_train_epochs=3,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    assert trainer.state.global_step == trainer.state.max_steps == 3 * steps
    assert len(engine.calls) == 3 * steps
    assert all(sampling.n == 1 and len(asked) == batch * accumulation for asked, sampling in engine.calls)
    assert not any(sampling.with_logps for _, sampling in engine.calls)
    for epoch in range(3):
        asked = [p[0] for call, _ in engine.calls[epoch * steps : (epoch + 1) * steps] for p in call]
        assert len(set(asked)) == len(asked) == batch * accumulation * steps


def test_the_order_of_prompts_is_shuffled_only_where_asked(tmp_path):
    orders = []
    for shuffle in (False, True):
        engine = ScriptedEngine(script)
        run(tmp_path, prompts(*EIGHT), engine, shuffle_dataset=shuffle, per_device_train_batch_size=1, max_steps=8)
        orders.append([call[0][0] for call, _ in engine.calls])
    assert orders[0] == list(range(10, 18))
    assert orders[1] != orders[0]
    assert sorted(orders[1]) == orders[0]


def test_fewer_prompts_than_a_step_are_refused(tmp_path):
    with pytest.raises(DataError, match="at least 8 prompts, has 7"):
        run(tmp_path, prompts(*EIGHT[:7]), per_device_train_batch_size=4, gradient_accumulation_steps=2)


def test_a_stream_of_prompts(tmp_path):
    engine = ScriptedEngine(script)
    stream = prompts(*EIGHT).to_iterable_dataset()
    run(tmp_path, stream, engine, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2)
    assert [[p[0] for p in call] for call, _ in engine.calls] == [[10, 11, 12, 13], [14, 15, 16, 17]]


@pytest.mark.parametrize("save_at", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, save_at):
    settings = {
        "learning_rate": 1e-2,
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": save_at,
        "beta": 0.5,
    }
    args = METHODS["distillation"].make_config(tmp_path, **settings)
    whole = METHODS["distillation"].make(args, prompts(*EIGHT), random_model(attention_dropout=0.1))
    whole.train()
    resumed = METHODS["distillation"].make(args, prompts(*EIGHT), random_model(seed=5, attention_dropout=0.1))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_at}"))
    assert whole.state.global_step == resumed.state.global_step == 4
    for name in ("loss", "grad_norm", "entropy", "num_tokens", "completions/mean_length"):
        assert logs(resumed, name) == pytest.approx(logs(whole, name), abs=1e-5), name
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(other, one, atol=1e-6, rtol=0, msg=name)


# ---- what is recorded ----


def test_the_metrics_of_a_step(tmp_path):
    """Lengths 1, 6, 2, 5, 3, 1, 4, 6, of which the last ends by itself."""
    engine = ScriptedEngine(lambda p, i: [30, 31, 32, 33, 34, 1] if p[0] == 17 else script(p, i))
    trainer = run(tmp_path, prompts(*EIGHT), engine, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    logged = trainer.state.log_history[0]
    expected = {
        "num_tokens": 8 + sum(LENGTHS),
        "completions/mean_length": 28 / 8,
        "completions/min_length": 1,
        "completions/max_length": 6,
        "completions/mean_terminated_length": 6,
        "completions/min_terminated_length": 6,
        "completions/max_terminated_length": 6,
        "completions/clipped_ratio": 7 / 8,
    }
    assert {name: logged[name] for name in expected} == pytest.approx(expected)
    assert 0 < logged["entropy"] < math.log(64)
    assert logged["step_time"] > 0
    assert not [name for name in logged if name.startswith(("reward", "kl", "clip_ratio", "frac_"))]


def test_tokens_are_counted_over_all_steps(tmp_path):
    trainer = run(tmp_path, prompts(*EIGHT), ScriptedEngine(script), max_steps=3)
    assert logs(trainer, "num_tokens") == [36, 72, 108]


def test_the_table_has_prompts_and_completions_and_no_reward(tmp_path, capsys):
    changes = {"log_completions": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    run(tmp_path, prompts(*EIGHT), ScriptedEngine([[11, 12, 1]]), num_completions_to_print=1, **changes)
    (path,) = (tmp_path / "completions").iterdir()
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == ["step", "prompt", "completion"]
    assert sorted(table["prompt"].to_pylist()) == EIGHT
    assert table["completion"].to_pylist() == ["w11 w12"] * 8
    assert capsys.readouterr().out.count("w11 w12") == 1


# ---- evaluation ----


def test_an_evaluation_has_the_loss_of_new_completions(tmp_path):
    args = METHODS["distillation"].make_config(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer = METHODS["distillation"].make(
        args,
        prompts(*["w10"] * 8),
        table_model(STUDENT),
        teacher_model=table_model(TEACHER),
        eval_dataset=prompts(*["w10"] * 5),
    )
    before = trainer.evaluate()
    trainer.train()
    (after,) = (entry for entry in trainer.state.log_history[1:] if "eval_loss" in entry)
    for metrics in (before, after):
        assert metrics["eval_loss"] == pytest.approx(LOSSES[1.0], abs=2e-6)
        assert metrics["eval_entropy"] == pytest.approx(math.log(2) / 2, abs=1e-5)
        assert metrics["eval_completions/mean_length"] == 2
    assert logs(trainer, "num_tokens") == [24]


def test_the_loss_of_an_evaluation_is_the_mean_over_its_tokens(tmp_path, expected):
    """However it is cut into batches, as in training, and as its own entropy is."""
    loss, entropy, _ = expected[1.0, 1.0]
    found = []
    for batch in (8, 4, 1):
        args = METHODS["distillation"].make_config(tmp_path, per_device_eval_batch_size=batch)
        trainer = METHODS["distillation"].make(args, prompts(*EIGHT), random_model(), eval_dataset=prompts(*EIGHT))
        trainer.engine = ScriptedEngine(script)
        found.append(trainer.evaluate())
    assert [m["eval_entropy"] for m in found] == pytest.approx([entropy] * 3, abs=1e-5)
    assert [m["eval_loss"] for m in found] == pytest.approx([loss] * 3, abs=1e-5)
