"""The loss of a whole run against its closed form, whatever the cut into micro-batches."""

import math
import warnings

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import CHAIN_S, CHAIN_T, chain_logp, random_model, table_model
from fixtures.runs import (
    GradientGrabber,
    Recorder,
    assert_same_gradients,
    group_advantages,
    grpo_config,
    logs,
    make,
    prompts,
    run,
)

SPLITS = [(8, 1), (4, 2), (2, 4)]
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SURROGATES_AT_RATIO_ONE = {
    # What a token adds, given its advantage and log-prob, while the policy is still the one that sampled.
    "cispo": lambda a, logp: -0.2 * a * logp,  # the cap epsilon_high (0.2) is below the ratio
    "sapo": lambda a, logp: -a * 2 / (1.0 if a > 0 else 1.05),  # sigmoid(0) * 4 / tau
    "vespo": lambda a, logp: -a * logp,  # exp(lambda + k log 1 - lambda 1) = 1
}


def closed_form(loss_type, recorder, advantages, max_length=6, chain=CHAIN_S):
    """The loss of all recorded completions in one optimizer step."""
    surrogate = SURROGATES_AT_RATIO_ONE.get(loss_type, lambda a, logp: -a)
    terms = [
        [surrogate(a, logp) for logp in chain_logp(chain, [10], ids)]
        for a, ids in zip(advantages, recorder.completions, strict=True)
    ]
    sequences, tokens = len(terms), sum(map(len, terms))
    total = sum(map(sum, terms))
    if loss_type in ("grpo", "sapo"):
        return sum(sum(t) / len(t) for t in terms) / sequences
    return total / {"dr_grpo": sequences * max_length, "luspo": sequences}.get(loss_type, tokens)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_equals_its_closed_form_in_every_split(tmp_path, loss_type, level):
    losses, gradients = [], []
    settings = [
        *({"per_device_train_batch_size": b, "gradient_accumulation_steps": a} for b, a in SPLITS),
        {"per_device_train_batch_size": 8, "max_tokens_per_micro_batch": 9},
    ]
    for changes in settings:
        recorder, grabber = Recorder(), GradientGrabber()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some pairs of type and level are advised against
            args = grpo_config(tmp_path, loss_type=loss_type, importance_sampling_level=level, **changes)
        trainer = run(table_model(CHAIN_S), recorder, args, prompts("w10", "w10"), callbacks=[grabber])
        advantages = group_advantages(recorder.rewards[0])
        assert any(advantages), "groups without spread would prove nothing"
        expected = closed_form(loss_type, recorder, advantages)
        assert logs(trainer, "loss")[0] == pytest.approx(expected, abs=1e-5)
        losses.append(logs(trainer, "loss")[0])
        gradients.append(grabber.steps[0])
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)
    for other in gradients[1:]:
        assert_same_gradients(gradients[0], other)
    if loss_type == "grpo":
        assert abs(losses[0]) < 1e-6


def test_the_check_values_of_known_lengths():
    lengths = [3, 3, 3, 5, 5, 5, 3, 5]
    advantages = group_advantages([float(n) for n in lengths])
    total = sum(a * n for a, n in zip(advantages, lengths, strict=True))
    assert -total / sum(lengths) == pytest.approx(-0.18748, abs=1e-5)
    assert -total / (8 * 6) == pytest.approx(-0.12499, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 12, 40])
def test_a_token_budget_changes_neither_loss_nor_gradient(tmp_path, budget):
    def step(max_tokens):
        grabber = GradientGrabber()
        args = grpo_config(
            tmp_path,
            per_device_train_batch_size=8,
            num_iterations=2,
            max_steps=2,
            learning_rate=1e-2,
            beta=0.1,
            entropy_coef=0.01,
            max_tokens_per_micro_batch=max_tokens,
        )
        trainer = run(random_model(), Recorder(_odd_ids), args, prompts("w10", "w11 w12"), callbacks=[grabber])
        return logs(trainer, "loss"), grabber.steps

    whole, pieces = step(None), step(budget)
    assert pieces[0] == pytest.approx(whole[0], abs=1e-5)
    for one, other in zip(whole[1], pieces[1], strict=True):
        assert_same_gradients(one, other, 1e-3)


def _odd_ids(completion_ids, **kwargs):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def test_the_last_short_step_of_an_epoch_divides_by_what_it_holds(tmp_path):
    """Three micro-steps, two a step: the second optimizer step has one."""
    recorder = Recorder()
    args = grpo_config(
        tmp_path,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        max_steps=-1,
        num_train_epochs=1,
        max_completion_length=5,
        seed=3,
    )
    trainer = run(table_model(CHAIN_S), recorder, args, prompts("w10", "w10", "w10"))
    lengths, rewards = [len(ids) for ids in recorder.calls[2]["completion_ids"]], recorder.rewards[2]
    advantages = group_advantages(rewards)
    assert any(advantages)
    expected = -sum(a * n for a, n in zip(advantages, lengths, strict=True)) / sum(lengths)
    assert logs(trainer, "loss")[1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_two_optimizer_steps_from_one_generation(tmp_path, loss_type):
    """`dapo` divides both by the mean token count of the generation, `bnpo` each by its own."""
    script = {10: [[11, 1], [11, 12, 13, 14, 15, 1], [12, 1], [13, 1]], 20: [[20] * n + [1] for n in (2, 3, 4, 5)]}
    args = grpo_config(tmp_path, loss_type=loss_type, steps_per_generation=2, max_steps=2)
    recorder = Recorder()
    trainer = make(random_model(), recorder, args, prompts("w10", "w20"))
    trainer.engine = ScriptedEngine(lambda prompt, index: script[prompt[-1]][index])
    trainer.train()
    assert len(recorder.calls) == 1
    advantages = group_advantages(recorder.rewards[0])
    groups = [list(zip(advantages[i : i + 4], recorder.lengths[i : i + 4], strict=True)) for i in (0, 4)]
    counts = [sum(n for _, n in group) for group in groups]
    assert counts[0] != counts[1]
    divisors = counts if loss_type == "bnpo" else [sum(counts) / 2] * 2
    expected = [-sum(a * n for a, n in group) / d for group, d in zip(groups, divisors, strict=True)]
    assert max(map(abs, expected)) > 1e-3
    assert sorted(logs(trainer, "loss")) == pytest.approx(sorted(expected), abs=1e-5)


def test_truncated_completions_leave_the_denominator_too(tmp_path):
    recorder = Recorder()
    args = grpo_config(tmp_path, max_completion_length=5, mask_truncated_completions=True)
    trainer = run(table_model(CHAIN_T), recorder, args, prompts("w10"))
    lengths = recorder.lengths
    assert sorted(set(lengths)) == [2, 5]
    advantages = group_advantages([float(n) for n in lengths])
    ended = [(a, n) for a, n in zip(advantages, lengths, strict=True) if n == 2]
    expected = -sum(a * n for a, n in ended) / sum(n for _, n in ended)
    assert logs(trainer, "loss")[0] == pytest.approx(expected, abs=1e-5)
    assert logs(trainer, "completions/clipped_ratio")[0] == lengths.count(5) / 4
    assert logs(trainer, "completions/mean_terminated_length")[0] == 2


def test_one_truncated_of_four_has_the_known_value():
    """Lengths 2, 5, 2, 2: the three that ended have the advantage -0.75 / (1.5 + 1e-4) each."""
    advantages = group_advantages([2.0, 5.0, 2.0, 2.0])
    assert -sum(advantages[i] * 2 for i in (0, 2, 3)) / 6 == pytest.approx(0.49997, abs=1e-5)


def test_a_batch_of_truncated_completions_only_has_no_loss_and_no_gradient(tmp_path):
    grabber = GradientGrabber()
    args = grpo_config(tmp_path, max_completion_length=2, mask_truncated_completions=True, steps_per_generation=1)
    trainer = run(table_model(CHAIN_S), Recorder(_first_wins), args, prompts("w10"), callbacks=[grabber])
    assert logs(trainer, "loss") == [0.0]
    assert logs(trainer, "completions/clipped_ratio") == [1.0]
    assert not any(g.any() for g in grabber.steps[0].values())


def _first_wins(completion_ids, **kwargs):
    return [1.0] + [0.0] * (len(completion_ids) - 1)


def test_every_eos_id_of_the_model_ends_a_completion(tmp_path):
    chain = {10: {11: 0.5, 12: 0.5}, 11: {2: 1.0}, 12: {13: 1.0}, 13: {2: 1.0}}
    model = table_model(chain)
    model.generation_config.eos_token_id = [1, 2]
    recorder = Recorder()
    args = grpo_config(tmp_path, mask_truncated_completions=True)
    trainer = run(model, recorder, args, prompts("w10"))
    assert set(map(tuple, recorder.completions)) == {(11, 2), (12, 13, 2)}
    assert logs(trainer, "completions/clipped_ratio") == [0.0]
    assert logs(trainer, "completions/mean_terminated_length") == logs(trainer, "completions/mean_length")
    assert abs(logs(trainer, "loss")[0]) > 1e-2


def test_ending_at_exactly_the_limit_is_not_truncation(tmp_path):
    model = table_model({10: {11: 0.5, 12: 0.5}, 11: {2: 1.0}, 12: {2: 1.0}})
    model.generation_config.eos_token_id = [1, 2]
    args = grpo_config(tmp_path, mask_truncated_completions=True, max_completion_length=2)
    recorder = Recorder(lambda completion_ids, **_: [float(ids[0] == 11) for ids in completion_ids])
    trainer = run(model, recorder, args, prompts("w10"))
    assert {len(ids) for ids in recorder.completions} == {2}
    assert logs(trainer, "completions/clipped_ratio") == [0.0]
    assert logs(trainer, "grad_norm")[0] > 0


def test_the_second_pass_over_a_batch_weighs_by_the_policy_ratio(tmp_path):
    """Two passes at a high learning rate: the second step's loss is that of the moved policy, computed from weights."""
    recorder = Recorder()
    args = grpo_config(
        tmp_path, num_iterations=2, max_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0
    )
    snapshots = _WeightsBeforeSteps()
    trainer = run(table_model(CHAIN_S), recorder, args, prompts("w10"), callbacks=[snapshots])
    assert len(recorder.calls) == 1
    advantages = group_advantages(recorder.rewards[0])
    old, new = (_logps(weights, recorder.completions) for weights in snapshots.weights)
    total = 0.0
    for a, before, after in zip(advantages, old, new, strict=True):
        for x, y in zip(before, after, strict=True):
            w = math.exp(y - x)
            total -= min(w * a, min(max(w, 0.8), 1.2) * a)
    assert logs(trainer, "loss")[1] == pytest.approx(total / sum(recorder.lengths), abs=1e-5)
    assert logs(trainer, "loss")[1] != pytest.approx(logs(trainer, "loss")[0], abs=1e-3)


class _WeightsBeforeSteps(GradientGrabber):
    def __init__(self):
        super().__init__()
        self.weights = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})


def _logps(weights, completions):
    """Log-probs by plain forward passes of one sequence each."""
    model = table_model(CHAIN_S)
    model.load_state_dict(weights, strict=False)
    out = []
    for ids in completions:
        with torch.no_grad():
            log_p = model(torch.tensor([[10, *ids]])).logits[0, :-1].log_softmax(1)
        out.append(log_p[range(len(ids)), ids].tolist())
    return out
