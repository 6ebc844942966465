"""`RLOOTrainer`: rewards, advantages, ratio and correction of whole completions, by hand and against plain torch."""

import copy
import math

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import CHAIN_T, random_model, table_model
from fixtures.online_methods import (
    DESCENT,
    GROUP_METHODS,
    METHODS,
    PROMPTS,
    distance,
    quick_collections,
    recorded_rounds,
    scripted_engine,
    variety,
    weights_of,
)
from fixtures.runs import GradientGrabber, by_length, logs, prompts

from trl import RLOOTrainer
from trl.errors import ConfigError, RewardError

RLOO = METHODS["rloo"]
# After prompt token 10: 11 eos, or 12 eos, half each.
CHOICE = {10: {11: 0.5, 12: 0.5}, 11: {1: 1.0}, 12: {1: 1.0}}
PAIR = {"num_generations": 2, **RLOO.sizes(2), "beta": 0.0}
# One step of this rate on the two completions of CHOICE with advantages 1 and -1 moves their probabilities from 1/2 to
# 3/4 and 1/4. The loss -(w_11 - w_12) / 2 has the gradient -+1/2 in the logits of 11 and 12; the hidden state is 8, so
# a step of r moves each head entry by 4 r, each logit by 32 r, and their difference by 64 r = ln 3.
TO_THREE_QUARTERS = {**DESCENT, "learning_rate": math.log(3) / 64}

_quick = pytest.fixture(scope="module", autouse=True)(quick_collections)


def first_wins(completion_ids, **kwargs):
    return [float(ids[0] == 11) for ids in completion_ids]


def choosing(folder, reward_funcs=first_wins, script=((11, 1), (12, 1)), chain=CHOICE, engine=None, **changes):
    """A trained trainer of a table model whose head alone learns, and its gradients; one prompt, two completions."""
    model, grabber = table_model(chain), GradientGrabber()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    args = RLOO.make_config(folder, **(PAIR | {"max_grad_norm": 0.0} | changes))
    engine = engine or ScriptedEngine([list(ids) for ids in script])
    dataset = prompts("w10", "w10")
    trainer = RLOO.make(args, dataset, model, engine=engine, reward_funcs=reward_funcs, callbacks=[grabber])
    advantages = recorded_advantages(trainer)
    trainer.train()
    return trainer, [step["lm_head.weight"] for step in grabber.steps], advantages


def recorded_advantages(trainer):
    """The advantages of every round from now on."""
    annotate, rounds = trainer.annotate, []

    def annotate_and_record(batch, rewards_NF, mode):
        columns = annotate(batch, rewards_NF, mode)
        assert columns["advantage"] == batch.advantages.tolist()
        rounds.append(columns["advantage"])
        return columns

    trainer.annotate = annotate_and_record
    return rounds


# ---- advantages ----


def in_order(*values):
    """A reward that gives these values to the completions in their order."""
    return lambda completion_ids, **_: [values[i % len(values)] for i in range(len(completion_ids))]


def test_each_completion_against_the_mean_of_the_others(tmp_path):
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
    changes = {"num_generations": 3, **RLOO.sizes(3)}
    trainer, _, advantages = choosing(tmp_path, in_order(1.0, 2.0, 6.0), [[11, 1]], **changes)
    assert advantages == [pytest.approx([-3.0, -1.5, 4.5])]
    assert logs(trainer, "reward") == [pytest.approx(3.0)]
    assert logs(trainer, "reward_std") == [pytest.approx(math.sqrt(7))]  # squares 4, 1, 9 over 2
    assert logs(trainer, "frac_reward_zero_std") == [0.0]


def test_normalized_advantages(tmp_path):
    # Against the others: -3, -5/3, -1/3, 5, whose squares sum to 332/9; over 3: 332/27.
    changes = {"num_generations": 4, **RLOO.sizes(4), "normalize_advantages": True}
    _, _, advantages = choosing(tmp_path, in_order(0.0, 1.0, 2.0, 6.0), [[11, 1]], **changes)
    scale = math.sqrt(332 / 27) + 1e-4
    assert advantages == [pytest.approx([-3 / scale, -5 / 3 / scale, -1 / 3 / scale, 5 / scale])]


@pytest.mark.parametrize("given", [(0.2, 0.7), [0.2, 0.7]])
def test_rewards_are_clamped_after_they_are_summed(tmp_path, given):
    # 0.5 * 1 + 2 * 0.2 = 0.9 -> 0.7 and 0.5 * 0 + 2 * 0.05 = 0.1 -> 0.2; each alone would stay as it is, or nearly.
    rewards = [first_wins, in_order(0.2, 0.05)]
    _, _, advantages = choosing(tmp_path, rewards, reward_clip_range=given, reward_weights=[0.5, 2.0])
    assert advantages == [pytest.approx([0.5, -0.5])]


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        # Second round, p = 3/4 and 1/4, reference 1/2: log-ratios ln 1.5 and -ln 2. Rewards 1 - 0.5 ln 1.5 and
        # 0 + 0.5 ln 2; their difference is 1 - 0.5 ln 3.
        (None, 1 - 0.5 * math.log(3)),
        # Clamped first: 0.7 - 0.2 - 0.5 ln 3. Clamped last it would be 0.7 - 0.35.
        ((0.2, 0.7), 0.5 - 0.5 * math.log(3)),
    ],
)
def test_the_divergence_from_the_reference_is_taken_off_the_clamped_reward(tmp_path, clip, expected):
    # The first round moves the policy to 3/4; its advantages have to be 1 and -1 for that, so a clamp halves them.
    rate = TO_THREE_QUARTERS["learning_rate"] * (1.0 if clip is None else 2.0)
    changes = {**TO_THREE_QUARTERS, "learning_rate": rate, "beta": 0.5, "max_steps": 2, "reward_clip_range": clip}
    trainer, _, advantages = choosing(tmp_path, **changes)
    first = 1.0 if clip is None else 0.5
    assert advantages == [pytest.approx([first, -first]), pytest.approx([expected, -expected], abs=1e-5)]
    # k3 of the four tokens: 2/3 + ln 1.5 - 1, 2 - ln 2 - 1, and 0 at both ends.
    assert logs(trainer, "kl") == pytest.approx([0.0, (2 / 3 + math.log(1.5) - 1 + 1 - math.log(2)) / 4], abs=1e-5)
    assert logs(trainer, "loss") == pytest.approx([0.0, 0.0], abs=1e-6)


def test_without_beta_there_is_no_reference(tmp_path):
    trainer, _, _ = choosing(tmp_path)
    assert trainer.ref_model is None
    assert logs(trainer, "kl") == []


# ---- the ratio of whole completions ----


@pytest.mark.parametrize(
    ("clip", "loss", "gradient", "hits"),
    [
        # Ratios 3/2 with advantage 1 and 1/2 with -1. -min(1.5, 1.2) and -min(-0.5, -0.8): nothing is left to move.
        ({}, (-1.2 + 0.8) / 2, 0.0, (0.5, 0.5)),
        ({"epsilon_high": 0.3}, (-1.3 + 0.8) / 2, 0.0, (0.5, 0.5)),
        # Only the upper clip is out of reach: 11 pushes its own logit by -(1/2) 1.5 (1 - 3/4) * 8.
        ({"epsilon_high": 0.6}, (-1.5 + 0.8) / 2, -1.5, (0.5, 0.0)),
        # None is in reach: 12 adds (1/2) 0.5 (0 - 3/4) * 8.
        ({"epsilon": 0.6}, (-1.5 + 0.5) / 2, -1.5 - 1.5, (0.0, 0.0)),
    ],
)
def test_the_second_pass_over_a_round_is_clipped(tmp_path, clip, loss, gradient, hits):
    trainer, gradients, advantages = choosing(tmp_path, num_iterations=2, max_steps=2, **TO_THREE_QUARTERS, **clip)
    assert advantages == [[1.0, -1.0]]
    # (-1/2) (1 - 1/2) + (1/2) (0 - 1/2) = -1/2 in the logit, times 8.
    assert gradients[0][11, 10].item() == pytest.approx(-4.0, abs=1e-5)
    assert logs(trainer, "loss") == pytest.approx([0.0, loss], abs=1e-5)
    assert gradients[1][11, 10].item() == pytest.approx(gradient, abs=1e-5)
    assert gradients[1][12, 10].item() == pytest.approx(-gradient, abs=1e-5)
    low, high = hits
    expected = {"low_mean": low, "low_min": low, "high_mean": high, "high_max": high, "region_mean": low + high}
    assert {name: logs(trainer, f"clip_ratio/{name}")[1] for name in expected} == pytest.approx(expected)
    assert logs(trainer, "clip_ratio/region_mean")[0] == 0.0


def test_completions_that_were_cut_off_leave_the_loss(tmp_path):
    """Rewards 2 and 6, advantages -4 and 4; the longer one was cut off. A mean over both: they count in it."""

    def step(masks, script):
        trainer, gradients, _ = choosing(
            tmp_path, by_length, script, CHAIN_T, mask_truncated_completions=masks, learning_rate=0.0
        )
        return logs(trainer, "loss")[0], gradients[0]

    ended, cut = [11, 1], [12] * 6
    loss, gradient = step(True, [ended, cut])
    assert loss == pytest.approx(4 / 2)
    # (1/2) 4 (1 - 1/2) * 8 of the completion that ended alone.
    assert gradient[11, 10].item() == pytest.approx(8.0)
    assert gradient[12, 12].item() == pytest.approx(0.0, abs=1e-6)
    loss, gradient = step(False, [ended, cut])
    assert loss == pytest.approx((4 - 4) / 2)
    # And of the other one, -(1/2) 4 (0 - 1/2) * 8.
    assert gradient[11, 10].item() == pytest.approx(16.0)
    loss, gradient = step(True, [cut, [12] * 7])
    assert loss == 0.0
    assert not gradient.any()


# ---- the correction of the sampler ----

# The sampler found 11 13 eos a quarter as likely as the trainer does, half as likely at each of two tokens.
CORRECTED = {10: {11: 0.5, 12: 0.5}, 11: {13: 1.0}, 13: {1: 1.0}, 12: {1: 1.0}}
LIKELY = {(11, 13, 1): [math.log(0.25), math.log(0.5), 0.0], (12, 1): [math.log(0.5), 0.0]}


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, (0.0, 1.0)),  # dropped: 4 is above the bound of 3, though neither token's 2 is
        ({"vllm_importance_sampling_clip_max": 5.0}, (4.0, 1.0)),
        ({"vllm_importance_sampling_clip_min": 2.0, "vllm_importance_sampling_clip_max": None}, (4.0, 0.0)),
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, (3.0, 1.0)),
        (
            {
                "vllm_importance_sampling_mode": "sequence_truncate",
                "vllm_importance_sampling_clip_min": 2.0,
                "vllm_importance_sampling_clip_max": None,
            },
            (4.0, 2.0),
        ),
        ({"vllm_importance_sampling_correction": False}, None),
    ],
)
def test_the_sampler_correction_weighs_whole_completions(tmp_path, changes, weights):
    engine = ScriptedEngine(
        [list(ids) for ids in LIKELY], logps=lambda prompt, ids: LIKELY[tuple(ids)], own_weights=True
    )
    trainer, gradients, advantages = choosing(tmp_path, chain=CORRECTED, engine=engine, **changes)
    assert advantages == [[1.0, -1.0]]
    of_good, of_bad = weights or (1.0, 1.0)
    assert logs(trainer, "loss") == pytest.approx([(-of_good + of_bad) / 2], abs=1e-5)
    # -(1/2) w (1 - 1/2) * 8 of the good one, and (1/2) w (0 - 1/2) * 8 of the other.
    assert gradients[0][11, 10].item() == pytest.approx(-2 * of_good - 2 * of_bad, abs=1e-5)
    if weights is None:
        assert not any(name.startswith("sampling/") and "sync" not in name for name in trainer.state.log_history[0])
        assert not engine.calls[0][1].with_logps
        return
    expected = {
        "sampling_logp_difference/mean": 2 * math.log(2) / 5,
        "sampling_logp_difference/max": math.log(2),
        "importance_sampling_ratio/mean": (3 * of_good + 2 * of_bad) / 5,  # over tokens
        "importance_sampling_ratio/min": min(weights),
        "importance_sampling_ratio/max": max(weights),
    }
    assert {n: trainer.state.log_history[0][f"sampling/{n}"] for n in expected} == pytest.approx(expected, abs=1e-5)


def test_an_engine_that_is_the_policy_needs_no_correction(tmp_path):
    engine = ScriptedEngine([[11, 1], [12, 1]], logps=lambda prompt, ids: [-5.0] * len(ids))
    trainer, _, _ = choosing(tmp_path, engine=engine)
    assert logs(trainer, "loss") == [0.0]
    assert not any(name.startswith("sampling/") for name in trainer.state.log_history[0])
    assert not engine.calls[0][1].with_logps


# ---- against plain torch ----


class Snapshots(GradientGrabber):
    """The weights before each optimizer step, and its gradients."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        super().on_pre_optimizer_step(args, state, control, model=model)
        self.weights.append(weights_of(model))


def model_of(weights):
    """The random model with these weights."""
    model = random_model()
    model.load_state_dict(weights, strict=False)
    return model


class Plain:
    """RLOO in a few lines: one sequence at a time, no packing, no masks but the choice of sequences."""

    def __init__(self, args):
        self.args = args

    def logp(self, model, prompt, completion):
        """Log-prob of a whole completion, differentiable in the model's parameters."""
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0] / self.args.temperature
        places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
        return logits.log_softmax(1)[places, completion].sum()

    def counts(self, completion):
        return completion[-1] == 1 or not self.args.mask_truncated_completions

    @torch.no_grad()
    def advantages(self, round_, old, start):
        """Of the clamped rewards less beta times the log-ratio, each against the mean of the other three."""
        args, taught = self.args, []
        low, high = args.reward_clip_range or (-math.inf, math.inf)
        for (prompt, completion), reward in zip(round_, variety([c for _, c in round_]), strict=True):
            kl = (self.logp(old, prompt, completion) - self.logp(start, prompt, completion)).item()
            taught.append(min(max(reward, low), high) - args.beta * (kl if self.counts(completion) else 0.0))
        groups = [taught[i : i + 4] for i in range(0, len(taught), 4)]
        out = [r - (sum(group) - r) / 3 for group in groups for r in group]
        if args.normalize_advantages:
            mean = sum(out) / len(out)
            std = math.sqrt(sum((a - mean) ** 2 for a in out) / (len(out) - 1))
            out = [(a - mean) / (std + 1e-4) for a in out]
        return out

    def step(self, round_, advantages, old, now):
        """Loss and gradients of one step, as a mean over the sequences of the round."""
        args, total = self.args, torch.zeros(())
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        for (prompt, completion), advantage in zip(round_, advantages, strict=True):
            if self.counts(completion):
                ratio = (self.logp(now, prompt, completion) - self.logp(old, prompt, completion).detach()).exp()
                bounded = ratio.clamp(1 - args.epsilon, 1 + high)
                total = total - torch.min(ratio * advantage, bounded * advantage) / len(round_)
        total.backward()
        return total.item(), {name: p.grad for name, p in now.named_parameters()}


VARIANTS = {
    "defaults": {},
    "temperature": {"temperature": 0.7, "beta": 0.4},
    "normalized": {"normalize_advantages": True, "reward_clip_range": (2.0, 4.0), "max_tokens_per_micro_batch": 15},
    "masked": {"mask_truncated_completions": True, "epsilon": 0.02, "epsilon_high": 0.03, "beta": 0.4},
    "no reference": {"beta": 0.0},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradient_are_those_of_plain_torch(tmp_path, changes, attention):
    """Two rounds, each used twice: the second pass has ratios other than 1, the second round a divergence."""
    snapshots = Snapshots()
    args = RLOO.make_config(tmp_path, num_iterations=2, max_steps=4, **{**DESCENT, "learning_rate": 1e-3, **changes})
    model = random_model(attn_implementation=attention)
    trainer = RLOO.make(args, PROMPTS, model, engine=scripted_engine(), callbacks=[snapshots])
    rounds, advantages = recorded_rounds(trainer), recorded_advantages(trainer)
    trainer.train()
    assert len(rounds) == 2
    plain = Plain(args)
    models = [model_of(weights) for weights in snapshots.weights]
    for step, now in enumerate(models):
        round_, old = rounds[step // 2], models[step // 2 * 2]
        expected = plain.advantages(round_, old, models[0])
        assert advantages[step // 2] == pytest.approx(expected, abs=1e-4)
        loss, gradients = plain.step(round_, expected, old, now)
        assert logs(trainer, "loss")[step] == pytest.approx(loss, abs=1e-4)
        assert distance(gradients, snapshots.steps[step]) < 1e-4
        now.zero_grad()
    assert logs(trainer, "loss")[1] != pytest.approx(logs(trainer, "loss")[0], abs=1e-3)


# ---- the rest ----


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reward_funcs": None}, ConfigError, "`reward_funcs` is missing"),
        ({"reward_funcs": []}, ConfigError, "`reward_funcs` is empty"),
        ({"reward_funcs": lambda completions, answer: []}, RewardError, "needs column `answer`"),
        ({"reward_processing_classes": [None, None]}, ConfigError, "for each of the 1 rewards"),
    ],
)
def test_rewards_that_cannot_work_are_named_before_a_model_is_loaded(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        RLOO.make(RLOO.make_config(tmp_path), PROMPTS, "no/such-model", **changes)


def test_rewards_may_be_given_by_position(tmp_path):
    model, args = random_model(), RLOO.make_config(tmp_path)
    tokenizer = RLOO.make(args, PROMPTS).processing_class
    trainer = RLOOTrainer(model, [variety, by_length], args, PROMPTS, None, tokenizer)
    trainer.train()
    assert trainer.scorer.names == ["variety", "by_length"]
    assert trainer.model is model


def test_dropout_that_is_switched_off_leaves_every_ratio_at_one(tmp_path):
    args = RLOO.make_config(tmp_path, num_iterations=2, max_steps=2, disable_dropout=True)
    trainer = RLOO.train(args, PROMPTS, random_model(attention_dropout=0.5))
    assert logs(trainer, "clip_ratio/region_mean") == [0.0, 0.0]
    assert logs(trainer, "kl") == pytest.approx([0.0, 0.0], abs=1e-6)  # the learning rate is 0
    with_dropout = RLOO.train(RLOO.make_config(tmp_path), PROMPTS, random_model(attention_dropout=0.5))
    assert logs(with_dropout, "kl")[0] > 1e-3


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_without_a_token_budget_no_forward_pass_is_larger_than_a_micro_step(tmp_path, name):
    """Four micro-steps of two completions, whose old and reference log-probs are needed."""
    method = METHODS[name]
    args = method.make_config(tmp_path, beta=0.1, steps_per_generation=4, num_iterations=2, **method.sizes(2))
    trainer = method.make(args, PROMPTS, engine=scripted_engine())
    token_logps, sizes = trainer.token_logps, []

    def measured(model, batch, **options):
        sizes.append(batch.num_sequences)
        return token_logps(model, batch, **options)

    trainer.token_logps = measured
    trainer.train()
    assert max(sizes) == 2


def test_the_reference_is_not_the_model_of_the_caller(tmp_path):
    model = random_model()
    untouched = copy.deepcopy(model)
    RLOO.train(RLOO.make_config(tmp_path), PROMPTS, model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))
    assert all(p.requires_grad for p in model.parameters())
