"""Pairs of completions in training: which one is preferred, and what loss and gradient are, however they are cut."""

import math
import warnings

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import CHAIN_T, random_model, table_model
from fixtures.online_methods import METHODS, quick_collections
from fixtures.runs import GradientGrabber, Recorder, assert_same_gradients, by_length, logs, prompts
from torch.nn.functional import logsigmoid

from trl.types import Completion

_quick = pytest.fixture(scope="module", autouse=True)(quick_collections)

ONLINE_DPO = METHODS["online-dpo"]
LN2 = math.log(2)
# Eight prompts, one of them twice; two completions each, of 1 to 6 tokens, some without an end.
TEXTS = ["w10", "w20 w21 w22", "w30 w31", "w40", "w20 w21 w22", "w50 w7 w8 w9", "w51", "w52 w53"]
ANSWERS = {
    (10,): [[11, 12, 1], [13, 1]],
    (20, 21, 22): [[21, 23, 25, 27, 29, 31], [1], [24, 1], [8, 9, 10, 1]],
    (30, 31): [[32, 33, 34, 35, 1], [36, 37, 38, 39, 1]],
    (40,): [[41, 1], [42, 43, 44, 45, 46, 47]],
    (50, 7, 8, 9): [[10, 1], [11, 1]],
    (51,): [[52, 52, 52, 1], [53, 1]],
    (52, 53): [[54, 55, 1], [56, 57, 58, 59, 60, 1]],
}


def answer(prompt, index):
    return ANSWERS[tuple(prompt)][index % len(ANSWERS[tuple(prompt)])]


def first_id(completion_ids, **kwargs):
    """The first id as a reward: no two of a pair are equal."""
    return [float(ids[0]) for ids in completion_ids]


def trainer_of(folder, reward=first_id, dataset=None, model=None, script=answer, ref_model=None, **changes):
    """A trainer whose completions come from the script, and the grabber of its gradients."""
    callbacks = changes.pop("callbacks", [])
    grabber = GradientGrabber()
    args = ONLINE_DPO.make_config(folder, **{"max_grad_norm": 0.0, "per_device_train_batch_size": 8, **changes})
    trainer = ONLINE_DPO.make(
        args,
        prompts(*TEXTS) if dataset is None else dataset,
        model,
        reward_funcs=reward,
        ref_model=ref_model,
        callbacks=[grabber, *callbacks],
    )
    if script is not None:
        trainer.engine = ScriptedEngine(script)
    return trainer, grabber


def step(folder, reward=first_id, **options):
    """Gradients and log of one optimizer step, for a reference model that is another one than the policy."""
    trainer, grabber = trainer_of(folder, reward, ref_model=random_model(seed=3, scale=5.0), **options)
    trainer.train()
    (gradients,) = grabber.steps
    return gradients, trainer.state.log_history[0], trainer


# ---- an independent computation ----


def sequence_logp(model, prompt, completion, temperature=1.0):
    """The completion's log-prob by a forward pass of its own, nothing packed or padded."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    log_p = (logits / temperature).double().log_softmax(-1)
    return log_p[torch.arange(len(completion)), torch.tensor(completion)].sum()


def expected_step(pairs, beta, loss_type, policy=None, reference=None):
    """Loss and gradients of (prompt, better, worse, weight) by plain autograd, averaged over the pairs.

    A weight of 0.5 in both orders makes a tie.
    """
    policy = policy or random_model()
    reference = reference or random_model(seed=3, scale=5.0)
    total = torch.zeros((), dtype=torch.float64)
    for prompt, better, worse, weight in pairs:
        ratios = []
        for completion in (better, worse):
            with torch.no_grad():
                of_reference = sequence_logp(reference, prompt, completion)
            ratios.append(sequence_logp(policy, prompt, completion) - of_reference)
        margin = ratios[0] - ratios[1]
        loss = -logsigmoid(beta * margin) if loss_type == "sigmoid" else (margin - 1 / (2 * beta)) ** 2
        total = total + weight * loss
    total = total / sum(weight for *_, weight in pairs)
    total.backward()
    return total.item(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def scripted_pairs(better):
    """(prompt, better, worse, 1) of every row of `TEXTS`; `better` tells it of two completions."""
    used, pairs = {}, []
    for text in TEXTS:
        prompt = tuple(int(word[1:]) for word in text.split())
        start = used.get(prompt, 0)
        used[prompt] = start + 2
        pairs.append((prompt, *sorted(ANSWERS[prompt][start : start + 2], key=better, reverse=True), 1.0))
    return pairs


@pytest.mark.parametrize("beta", [0.1, 0.02])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_loss_and_gradient_are_those_of_the_paper(tmp_path, loss_type, beta):
    loss, expected = expected_step(scripted_pairs(lambda ids: ids[0]), beta, loss_type)
    gradients, log, _ = step(tmp_path, loss_type=loss_type, beta=beta)
    assert log["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(expected, gradients, 1e-4)


def test_log_probs_of_the_loss_are_at_temperature_1(tmp_path):
    """Sampled at 0.9, or at what `generation_kwargs` say: the loss looks at the policy itself."""
    loss, _ = expected_step(scripted_pairs(lambda ids: ids[0]), 0.1, "sigmoid")
    for changes, temperature in [
        ({}, 0.9),
        ({"temperature": 0.5}, 0.5),
        ({"generation_kwargs": {"temperature": 2.0}}, 2.0),
    ]:
        _, log, trainer = step(tmp_path, **changes)
        ((_, sampling),) = trainer.engine.calls
        assert sampling.temperature == temperature
        assert log["loss"] == pytest.approx(loss, rel=1e-5)


# ---- the weight beta ----


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ([0.5, 0.2], [0.5, 0.5, 0.2, 0.2, 0.2, 0.2]),
        ([0.3], [0.3] * 6),
        (0.3, [0.3] * 6),
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]),
    ],
)
def test_a_list_of_betas_has_one_per_epoch(tmp_path, given, used):
    """Three epochs of two optimizer steps; the last value stays."""
    dataset = prompts("w10", "w40", "w51", "w52 w53")
    options = {"beta": given, "max_steps": -1, "num_train_epochs": 3, "shuffle_dataset": False}
    trainer, _ = trainer_of(
        tmp_path,
        dataset=dataset,
        ref_model=random_model(seed=3, scale=5.0),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        **options,
    )
    trainer.train()
    assert logs(trainer, "beta") == pytest.approx(used)
    first_two = [(prompt, *sorted(ANSWERS[prompt], reverse=True), 1.0) for prompt in [(10,), (40,)]]
    last_two = [(prompt, *sorted(ANSWERS[prompt], reverse=True), 1.0) for prompt in [(51,), (52, 53)]]
    expected = [expected_step(rows, beta, "sigmoid")[0] for rows, beta in zip([first_two, last_two] * 3, used)]
    assert logs(trainer, "loss") == pytest.approx(expected, rel=1e-4)


# ---- no cut changes anything ----


def weighed(completion_ids, **kwargs):
    """The first id; the pairs after prompt 40 tie, the second completion after 30 31 has no score."""
    scores = {41: 7.0, 42: 7.0, 36: None}
    return [scores.get(ids[0], float(ids[0])) for ids in completion_ids]


CUTS = [
    {"per_device_train_batch_size": 8},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    *({"max_tokens_per_micro_batch": budget} for budget in (1, 9, 13, 21, 40, 1000)),
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_tokens_per_micro_batch": 15},
]


@pytest.fixture(scope="module")
def whole_batch(tmp_path_factory):
    """Gradients and log of the whole batch at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {loss: step(tmp_path_factory.mktemp(loss), weighed, loss_type=loss)[:2] for loss in ("sigmoid", "ipo")}


@pytest.mark.filterwarnings("ignore:No reward function scored")
@pytest.mark.parametrize(
    ("loss_type", "cut"), [*(("sigmoid", cut) for cut in CUTS), ("ipo", CUTS[5]), ("ipo", CUTS[-1])]
)
def test_no_cut_changes_the_gradient(tmp_path, whole_batch, cut, loss_type):
    """Accumulation is a mean, and pairs stay whole: also with ties, a prompt that occurs twice, and no score."""
    expected, log = whole_batch[loss_type]
    trainer, grabber = trainer_of(
        tmp_path, weighed, ref_model=random_model(seed=3, scale=5.0), loss_type=loss_type, **cut
    )
    units = watch_units(trainer)
    trainer.train()
    assert_same_gradients(expected, grabber.steps[0], 1e-5)
    found = trainer.state.log_history[0]
    varying = {"step_time", "epoch"}
    assert {k: v for k, v in found.items() if k not in varying} == pytest.approx(
        {k: v for k, v in log.items() if k not in varying}, rel=1e-4, abs=1e-5
    )
    assert all(batch.count(unit) == 2 for batch in units for unit in batch)
    # The pair without a score goes through the model only where nothing else would.
    assert len([unit for batch in units for unit in batch]) == 2 * 7 + 2 * (cut.get("gradient_accumulation_steps") == 8)


def watch_units(trainer):
    """The units of every micro-batch whose loss is computed from now on."""
    seen, loss = [], trainer.loss

    def watched(model, batch, mode):
        seen.append(batch.units.tolist())
        return loss(model, batch, mode)

    trainer.loss = watched
    return seen


def test_gradients_of_the_whole_batch_are_not_zero(whole_batch):
    for gradients, log in whole_batch.values():
        assert log["grad_norm"] > 1e-3
        assert log["pairs/tied"] == pytest.approx(1 / 7)
        assert any(g.abs().max() > 1e-4 for g in gradients.values())


# ---- completions without a score ----


def scored_only(*first_ids):
    """A reward that scores only completions which begin with these, by that id."""

    def reward(completion_ids, **kwargs):
        return [float(ids[0]) if ids[0] in first_ids else None for ids in completion_ids]

    return reward


@pytest.mark.parametrize("budget", [None, 1, 11])
def test_a_pair_without_a_score_is_out_of_the_loss(tmp_path, budget):
    """Of eight pairs one is scored in full, another in half: an eighth of the one's gradient remains."""
    loss, expected = expected_step([((51,), [53, 1], [52, 52, 52, 1], 1.0)], 0.1, "sigmoid")
    with pytest.warns(UserWarning, match="No reward function scored 13 of 16 completions"):
        gradients, log, _ = step(tmp_path, scored_only(52, 53, 41), max_tokens_per_micro_batch=budget)
    assert log["loss"] == pytest.approx(loss / 8, rel=1e-5)
    assert_same_gradients({n: g / 8 for n, g in expected.items()}, gradients, 1e-4)
    assert log["reward"] == pytest.approx((52 + 53 + 41) / 3)
    assert log["objective/scores"] == pytest.approx((52 + 53 + 41) / 3)
    assert log["objective/scores_margin"] == pytest.approx(1.0)
    assert log["pairs/tied"] == 0.0


@pytest.mark.parametrize("missing_eos_penalty", [None, 2.0])
@pytest.mark.parametrize("budget", [None, 1])
def test_without_any_score_the_gradient_is_zero(tmp_path, budget, missing_eos_penalty):
    trainer, grabber = trainer_of(
        tmp_path,
        scored_only(),
        ref_model=random_model(seed=3),
        max_tokens_per_micro_batch=budget,
        missing_eos_penalty=missing_eos_penalty,
        max_steps=3,
        learning_rate=1e-2,
    )
    start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.warns(UserWarning, match="No reward function scored 16 of 16 completions") as caught:
        trainer.train()
    assert len([w for w in caught if "No reward function" in str(w.message)]) == 1
    assert len(grabber.steps) == 3
    assert grabber.steps[0].keys() == start.keys()
    assert not any(g.any() for gradients in grabber.steps for g in gradients.values())
    assert logs(trainer, "loss") == [0.0] * 3
    assert logs(trainer, "grad_norm") == [0.0] * 3
    for key in (
        "reward",
        "objective/scores",
        "objective/scores_margin",
        "objective/kl",
        "rewards/chosen",
        "pairs/tied",
    ):
        assert logs(trainer, key) == [None] * 3, key
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, start[name]), name


def test_one_of_several_rewards_is_score_enough(tmp_path):
    def never(completion_ids, **kwargs):
        return [None] * len(completion_ids)

    loss, expected = expected_step(scripted_pairs(lambda ids: ids[0]), 0.1, "sigmoid")
    gradients, log, _ = step(tmp_path, [never, first_id])
    assert log["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(expected, gradients, 1e-4)


# ---- ties ----


def test_a_tie_counts_half_in_either_order(tmp_path):
    """Its gradient pulls log-ratios that differ together; how, is written in `trl.functional.preference`."""
    rows = [(prompt, *order, 0.5) for prompt in [(10,), (51,)] for order in (ANSWERS[prompt], ANSWERS[prompt][::-1])]
    loss, expected = expected_step(rows, 0.1, "sigmoid")
    gradients, log, _ = step(
        tmp_path,
        lambda completion_ids, **_: [1.0] * len(completion_ids),
        dataset=prompts("w10", "w51"),
        per_device_train_batch_size=2,
    )
    assert log["loss"] == pytest.approx(loss, rel=1e-5)
    assert log["pairs/tied"] == 1.0
    assert log["rewards/chosen"] is None
    assert log["rewards/accuracies"] is None
    assert_same_gradients(expected, gradients, 1e-4)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_tie_teaches_nothing_where_the_policy_is_its_reference(tmp_path, loss_type):
    def gradients(reward):
        trainer, grabber = trainer_of(tmp_path, reward, loss_type=loss_type)
        trainer.train()
        return grabber.steps[0], logs(trainer, "loss")[0]

    tied, loss = gradients(lambda completion_ids, **_: [3.0] * len(completion_ids))
    decided, _ = gradients(first_id)
    assert loss == pytest.approx(LN2 if loss_type == "sigmoid" else 0.0, abs=1e-6)
    largest = max(g.abs().max().item() for g in decided.values())
    assert max(g.abs().max().item() for g in tied.values()) < 1e-6 * largest


# ---- the penalty on completions that did not end ----


def words(completions, **kwargs):
    return [float(len(text.split())) for text in completions]


def test_the_penalty_looks_at_the_completion_alone_and_is_subtracted(tmp_path):
    """Prompts that hold an EOS, completions `w11 <eos>` or five times `w12`, half each."""
    recorder = Recorder(words)
    trainer, _ = trainer_of(
        tmp_path,
        recorder,
        dataset=prompts(*["<eos> w10"] * 4),
        model=table_model(CHAIN_T),
        script=None,
        per_device_train_batch_size=4,
        max_tokens=5,
        missing_eos_penalty=100.0,
        max_steps=4,
    )
    trainer.train()
    assert {tuple(ids) for ids in recorder.completions} == {(11, 1), (12,) * 5}
    for number in range(4):
        rewards = recorder.rewards[number]
        assert sorted(set(rewards)) == [1.0, 5.0]
        without_end = rewards.count(5.0) / 8
        log = trainer.state.log_history[number]
        assert log["reward"] == pytest.approx(sum(rewards) / 8)
        assert log["objective/scores"] == pytest.approx(sum(rewards) / 8 - 100 * without_end, abs=1e-4)
        assert log["val/contain_eos_token"] == pytest.approx(1 - without_end)
        assert log["completions/clipped_ratio"] == pytest.approx(without_end)


def test_the_penalty_in_numbers(tmp_path):
    """Words 1 1, 1 5, 1 1, 1 5: 2 on average, a quarter of them pays 100, and what ended is preferred."""
    trainer, _ = trainer_of(
        tmp_path,
        words,
        dataset=prompts(*["<eos> w10"] * 4),
        script=[[11, 1], [11, 1], [11, 1], [12] * 5],
        per_device_train_batch_size=4,
        max_tokens=5,
        missing_eos_penalty=100.0,
    )
    trainer.collect([{"prompt": "<eos> w10"}] * 8)
    table = trainer.completion_tables["train"].take()
    assert [row["score"] for row in table] == [1, 1, 1, -95, 1, 1, 1, -95]
    assert [row["preference"] for row in table] == [0, 0, 1, -1, 0, 0, 1, -1]
    trainer.metrics["train"].flush(trainer.processes.gather)
    trainer.train()
    (log, *_) = trainer.state.log_history
    assert log["reward"] == 2.0
    assert log["objective/scores"] == 2 - 25
    assert log["val/contain_eos_token"] == 0.75
    assert log["objective/scores_margin"] == 48.0  # two of the four pairs: 1 - (5 - 100)
    assert log["pairs/tied"] == 0.5


def test_an_end_at_exactly_the_limit_is_an_end(tmp_path):
    trainer, _ = trainer_of(
        tmp_path,
        words,
        dataset=prompts("w10"),
        script=[[12, 12, 1], [12, 12, 12]],
        per_device_train_batch_size=1,
        max_tokens=3,
        missing_eos_penalty=10.0,
    )
    trainer.train()
    assert logs(trainer, "objective/scores") == [(2 + 3 - 10) / 2]
    assert logs(trainer, "val/contain_eos_token") == [0.5]


# ---- completions without a token ----


class Silent(ScriptedEngine):
    """An engine one of whose two completions holds nothing."""

    def __init__(self, silent):
        super().__init__([])
        self.silent = silent

    def generate(self, prompts, sampling):
        for index, _ in enumerate(prompts):
            pair = [Completion([11, 12, 1], [], "stop"), Completion([13, 1], [], "stop")]
            pair[self.silent] = Completion([], [], "length")
            yield index, pair


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize(("count", "budget"), [(1, None), (2, None), (2, 1)])
def test_a_completion_without_a_token_has_the_log_prob_zero(tmp_path, silent, count, budget):
    """Two prompts have one such completion each: what is left of the two pairs must not become one."""
    texts, other = ["w10", "w40"][:count], ([11, 12, 1], [13, 1])[1 - silent]
    policy, reference = random_model(), random_model(seed=3, scale=5.0)
    prompt_ids = [[int(text[1:])] for text in texts]
    ratios = [(sequence_logp(policy, p, other) - sequence_logp(reference, p, other)).item() for p in prompt_ids]
    sizes = {"per_device_train_batch_size": count, "max_tokens_per_micro_batch": budget}
    trainer, grabber = trainer_of(
        tmp_path, by_length, dataset=prompts(*texts), ref_model=reference, script=None, **sizes
    )
    trainer.engine = Silent(silent)
    trainer.train()
    expected = sum(math.log1p(math.exp(-0.1 * ratio)) for ratio in ratios) / count
    assert logs(trainer, "loss")[0] == pytest.approx(expected, rel=1e-5)
    assert any(g.any() for g in grabber.steps[0].values())
