"""Four surrogates times their reductions, against numbers worked out by hand on one small ragged batch.

Sequences of 2, 3 and 1 tokens with advantages 1, -1/2 and 2; the fourth token and the whole third sequence are masked.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trl.functional.advantages import group_relative
from trl.functional.policy import (
    POLICY_LOSSES,
    PolicyOptions,
    PolicyTokens,
    cispo,
    clipped,
    clipped_surrogate,
    policy_ratio,
    policy_terms,
    sapo,
    sequence_ratio,
    vespo,
    vespo_weight,
)
from trl.types import Normalizer

SEQ = torch.tensor([0, 0, 1, 1, 1, 2])
MASK = torch.tensor([1, 1, 1, 0, 1, 0]).double()
W = torch.tensor([1.5, 0.9, 0.5, 3.0, 1.1, 1.2]).double()
LOGPS = torch.tensor([-1.0, -2.0, -0.5, -1.5, -1.0, -0.7]).double()
OLD = LOGPS - W.log()
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0]).double()
NORM = Normalizer(sequences=3, tokens=4, generation_tokens=5, max_length=10)
# Lower clip 0.8. Upper: 1.3 of the ratio; cispo's cap is the value itself.
CLIP = PolicyOptions(epsilon=0.2, epsilon_high=0.3)
CAP = PolicyOptions(epsilon=0.2, epsilon_high=1.2)

# Ratios of the sequences: geometric means over loss tokens; a sequence without loss tokens has 1.
S0, S1 = math.sqrt(1.5 * 0.9), math.sqrt(0.5 * 1.1)
# Products of the sequences.
P0, P1 = 1.5 * 0.9, 0.5 * 1.1
PHI0 = math.exp(3) * P0**2 * math.exp(-3 * P0)
PHI1 = math.exp(2) * P1**3 * math.exp(-2 * P1)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def soft_positive(w):
    return 4 * sigmoid(w - 1)


def soft_negative(w):
    return 4 / 1.05 * sigmoid(1.05 * (w - 1))


def tokens(level="token", logps=LOGPS, correction=None, old=OLD) -> PolicyTokens:
    log_ratio = logps - old
    return PolicyTokens(
        logps=logps,
        ratio=policy_ratio(log_ratio, MASK, SEQ, 3, level),
        log_ratio=log_ratio,
        advantages=ADVANTAGES[SEQ],
        mask=MASK,
        seq_of_token=SEQ,
        num_sequences=3,
        correction=correction,
    )


def loss(loss_type, t: PolicyTokens, options, **kwargs) -> Tensor:
    return POLICY_LOSSES[loss_type][1](policy_terms(loss_type, t, options, **kwargs), MASK, SEQ, NORM)


# Terms of the loss tokens, sequence by sequence.
TOKEN_CLIP = [[-1.3, -0.9], [0.5 * 0.8, 0.5 * 1.1]]
SEQUENCE_CLIP = [[-S0, -S0], [0.5 * 0.8, 0.5 * 0.8]]
TOKEN_CAP = [[1.2 * 1.0, 0.9 * 2.0], [-0.5 * 0.5 * 0.5, -1.1 * 0.5 * 1.0]]
SEQUENCE_CAP = [[S0 * 1.0, S0 * 2.0], [-S1 * 0.5 * 0.5, -S1 * 0.5 * 1.0]]
TOKEN_SOFT = [[-soft_positive(1.5), -soft_positive(0.9)], [0.5 * soft_negative(0.5), 0.5 * soft_negative(1.1)]]
SEQUENCE_SOFT = [[-soft_positive(S0)] * 2, [0.5 * soft_negative(S1)] * 2]
WEIGHED = [[PHI0 * 1.0, PHI0 * 2.0], [-PHI1 * 0.5 * 0.5, -PHI1 * 0.5 * 1.0]]


def total(terms):
    return sum(map(sum, terms))


def mean_of_means(terms):
    return sum(sum(t) / len(t) for t in terms) / 3


@pytest.mark.parametrize(
    ("loss_type", "level", "options", "expected"),
    [
        ("grpo", "token", CLIP, mean_of_means(TOKEN_CLIP)),
        ("grpo", "sequence", CLIP, mean_of_means(SEQUENCE_CLIP)),
        ("bnpo", "token", CLIP, total(TOKEN_CLIP) / 4),
        ("bnpo", "sequence", CLIP, total(SEQUENCE_CLIP) / 4),
        ("dr_grpo", "token", CLIP, total(TOKEN_CLIP) / (3 * 10)),
        ("dr_grpo", "sequence", CLIP, total(SEQUENCE_CLIP) / (3 * 10)),
        ("dapo", "token", CLIP, total(TOKEN_CLIP) / 5),
        ("dapo", "sequence", CLIP, total(SEQUENCE_CLIP) / 5),
        ("luspo", "token", CLIP, total(TOKEN_CLIP) / 3),
        ("luspo", "sequence", CLIP, total(SEQUENCE_CLIP) / 3),
        ("cispo", "token", CAP, total(TOKEN_CAP) / 5),
        ("cispo", "sequence", CAP, total(SEQUENCE_CAP) / 5),
        ("sapo", "token", CLIP, mean_of_means(TOKEN_SOFT)),
        ("sapo", "sequence", CLIP, mean_of_means(SEQUENCE_SOFT)),
        ("vespo", "token", CLIP, total(WEIGHED) / 5),
        ("vespo", "sequence", CLIP, total(WEIGHED) / 5),
    ],
)
def test_eight_losses_at_two_levels(loss_type, level, options, expected):
    assert_close(loss(loss_type, tokens(level), options).item(), expected)


def test_the_table_holds_the_eight_types():
    assert set(POLICY_LOSSES) == {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"}


def test_some_numbers_in_digits():
    got = {name: loss(name, tokens(), CLIP).item() for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")}
    expected = {"grpo": -0.625 / 3, "bnpo": -0.3125, "dr_grpo": -1.25 / 30, "dapo": -0.25, "luspo": -1.25 / 3}
    assert got == pytest.approx(expected)
    assert loss("cispo", tokens(), CAP).item() == pytest.approx(0.465)


def test_ratio_of_a_sequence_without_loss_tokens_is_one():
    expected = torch.tensor([S0, S0, S1, S1, S1, 1.0]).double()
    assert_close(tokens("sequence").ratio, expected)
    assert_close(tokens("token").ratio, W)


def one_token(w, advantage, logp=-1.0) -> PolicyTokens:
    ratio = torch.tensor([w]).double()
    return PolicyTokens(
        logps=torch.tensor([logp]).double(),
        ratio=ratio,
        log_ratio=ratio.log(),
        advantages=torch.tensor([advantage]).double(),
        mask=torch.ones(1).double(),
        seq_of_token=torch.tensor([0]),
        num_sequences=1,
    )


@pytest.mark.parametrize(
    ("w", "advantage", "expected"),
    [
        # A > 0: the upper clip 1.2 binds first. A < 0: the bound 2 on the unclipped ratio does.
        (3.0, 1.0, -1.2),
        (1.1, 1.0, -1.1),
        (0.5, 1.0, -0.5),
        (3.0, -1.0, 2.0),
        (1.9, -1.0, 1.9),
        (0.5, -1.0, 0.8),
    ],
)
def test_two_sided_clip(w, advantage, expected):
    t = one_token(w, advantage)
    assert_close(clipped(t, PolicyOptions(delta=2.0)).item(), expected)
    # Without the bound a bad token costs as much as its ratio.
    if w == 3.0 and advantage < 0:
        assert_close(clipped(t, PolicyOptions()).item(), 3.0)


def test_the_clip_takes_any_shape():
    # Upper clip 1.3, lower 0.8, the bound 2: as token by token above.
    ratio = torch.tensor([[3.0, 1.1, 0.5], [3.0, 1.9, 0.5]])
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    expected = torch.tensor([[-1.3, -1.1, -0.5], [2.0, 1.9, 0.8]])
    assert_close(clipped_surrogate(ratio, advantages, 0.2, 0.3, delta=2.0), expected)
    assert_close(clipped_surrogate(ratio[1, 0], advantages[1, 0], 0.2, 0.3), torch.tensor(3.0))
    assert_close(clipped(tokens(), CLIP), clipped_surrogate(W, ADVANTAGES[SEQ], 0.2, 0.3))


@pytest.mark.parametrize("mask", [MASK, MASK.bool()])
def test_ratio_of_a_sequence_is_the_product_over_its_loss_tokens(mask):
    # 1.5 * 0.9 and 0.5 * 1.1; the third sequence has no loss token, the fourth no token.
    expected = torch.tensor([P0, P1, 1.0, 1.0]).double()
    assert_close(sequence_ratio(LOGPS - OLD, mask, SEQ, 4), expected)


def test_loss_and_gradient_of_whole_sequences():
    # Ratios 1.35 and 0.55 with advantages 1 and -1/2: both at the clip, which is 1.3 above and 0.8 below.
    # The third sequence has ratio 1 and no loss token.
    x = LOGPS.clone().requires_grad_()
    terms = clipped_surrogate(sequence_ratio(x - OLD, MASK, SEQ, 3), ADVANTAGES, 0.2, 0.3)
    assert_close(terms, torch.tensor([-1.3, 0.5 * 0.8, -2.0]).double())
    assert torch.autograd.grad(terms.sum(), x)[0].tolist() == [0.0] * 6
    # With wide bounds the gradient at each loss token is -A times the sequence's ratio.
    terms = clipped_surrogate(sequence_ratio(x - OLD, MASK, SEQ, 3), ADVANTAGES, 0.5, 0.5)
    expected = torch.tensor([-P0, -P0, 0.5 * P1, 0.0, 0.5 * P1, 0.0]).double()
    assert_close(torch.autograd.grad(terms.sum(), x)[0], expected)


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_sequence_far_from_the_policy_stays_finite(log_ratio, advantage):
    x = torch.full((4,), log_ratio / 4, requires_grad=True)
    ratio = sequence_ratio(x, torch.ones(4), torch.zeros(4, dtype=torch.long), 1)
    loss = clipped_surrogate(ratio, torch.tensor([advantage]), 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert x.grad.tolist() == [0.0] * 4


def test_upper_clip_is_the_lower_one_unless_given():
    assert PolicyOptions(epsilon=0.1).high == 0.1
    assert PolicyOptions(epsilon=0.1, epsilon_high=0.0).high == 0.0


@pytest.mark.parametrize(("advantage", "slope"), [(1.0, -1.0), (-2.0, 2.0)])
def test_soft_gate_has_the_policy_gradient_at_ratio_one(advantage, slope):
    # d/dw of -A 4/tau sigmoid(tau (w - 1)) at 1 is -A.
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    sapo(replace(one_token(1.0, advantage), ratio=w), PolicyOptions()).backward()
    assert_close(w.grad.item(), slope)


def test_soft_gate_of_advantage_zero_is_zero():
    assert sapo(one_token(5.0, 0.0), PolicyOptions()).item() == 0.0


class TestVespoWeight:
    def test_at_ratio_one(self):
        # e^lambda 1^k e^-lambda
        assert_close(vespo_weight(one_token(1.0, 1.0), PolicyOptions()).item(), 1.0)
        assert_close(vespo_weight(one_token(1.0, -1.0), PolicyOptions()).item(), 1.0)

    def test_advantage_zero_counts_as_positive(self):
        got = vespo_weight(one_token(2.0, 0.0), PolicyOptions()).item()
        assert_close(got, math.exp(3) * 2**2 * math.exp(-6))

    def test_the_correction_is_part_of_the_weight(self):
        rho = torch.tensor([2.0, 0.5, 0.7, 9.0, 1.0, 9.0]).double()
        got = vespo_weight(tokens(correction=rho), CLIP)
        w0, w1 = P0 * 2.0 * 0.5, P1 * 0.7
        expected = [math.exp(3) * w0**2 * math.exp(-3 * w0), math.exp(2) * w1**3 * math.exp(-2 * w1), 1.0]
        assert_close(got, torch.tensor(expected).double())

    def test_the_correction_enters_once(self):
        rho = torch.tensor([2.0, 0.5, 0.7, 9.0, 1.0, 9.0]).double()
        t = tokens(correction=rho)
        assert_close(policy_terms("vespo", t, CLIP), vespo(t, CLIP))

    def test_a_masked_correction_is_a_small_weight(self):
        # log 0 is bounded by log 1e-8: 1e-16 times e^3.
        t = replace(one_token(1.0, 1.0), correction=torch.zeros(1).double())
        assert_close(vespo_weight(t, PolicyOptions()).item(), math.exp(3) * 1e-16, rtol=1e-5, atol=0)

    def test_a_ratio_without_bounds_stays_finite(self):
        for log_ratio, expected in ((1e4, 0.0), (-1e4, math.exp(3 - 3e-8) * 1e-16), (math.nan, 0.0)):
            t = replace(one_token(1.0, 1.0), log_ratio=torch.tensor([log_ratio]).double())
            assert_close(vespo_weight(t, PolicyOptions()).item(), expected, rtol=1e-5, atol=0)

    def test_a_sequence_without_tokens(self):
        t = replace(one_token(1.5, 1.0), num_sequences=2)
        assert_close(vespo_weight(t, PolicyOptions())[1].item(), 1.0)

    def test_it_has_no_gradient(self):
        t = tokens(logps=LOGPS.clone().requires_grad_())
        assert not vespo_weight(t, CLIP).requires_grad


# KL estimate of each token: ref - policy = ln 2 everywhere.
K = 1 - math.log(2)


@pytest.mark.parametrize(("corrected", "factor"), [(True, W), (False, torch.ones(6).double())])
def test_kl_with_and_without_ratio_correction(corrected, factor):
    t = tokens()
    got = policy_terms(
        "grpo", t, CLIP, ref_logps=LOGPS + math.log(2), beta=0.1, bias_corrected_kl=corrected
    ) - policy_terms("grpo", t, CLIP)
    assert_close(got, 0.1 * K * factor)


def test_order_of_multiplication():
    keep = torch.tensor([1, 0, 1, 1, 1, 0]).bool()
    rho = torch.tensor([2.0, 3.0, 0.5, 1.0, 0.0, 1.0]).double()
    for loss_type, t in (("grpo", tokens(correction=rho)), ("sapo", tokens("sequence", correction=rho))):
        surrogate = POLICY_LOSSES[loss_type][0]
        got = policy_terms(loss_type, t, CLIP, keep=keep, ref_logps=LOGPS + math.log(2), beta=0.5)
        # Masks and correction act on the surrogate; the KL of dropped tokens stays.
        assert_close(got, surrogate(t, CLIP) * keep * rho + 0.5 * K * t.ratio)


def test_masks_act_on_vespo_too():
    keep = torch.tensor([1, 0, 1, 1, 1, 0]).bool()
    assert_close(policy_terms("vespo", tokens(), CLIP, keep=keep), vespo(tokens(), CLIP) * keep)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", [n for n, (s, _) in POLICY_LOSSES.items() if s in (clipped, sapo)])
def test_gradients_through_the_ratio(loss_type, level):
    def f(logps):
        t = tokens(level, logps=logps)
        return loss(loss_type, t, replace(CLIP, delta=2.0), ref_logps=LOGPS - 0.3, beta=0.1)

    assert torch.autograd.gradcheck(f, (LOGPS.clone().requires_grad_(),))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss_type", "surrogate"), [("cispo", cispo), ("vespo", vespo)])
def test_gradients_past_a_frozen_weight(loss_type, surrogate, level):
    frozen = tokens(level)

    def f(logps):
        return loss(loss_type, replace(frozen, logps=logps), CAP)

    x = LOGPS.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, (x,))
    # The same gradient where the weight is computed from the log-probs being trained.
    live = torch.autograd.grad(loss(loss_type, tokens(level, logps=x), CAP), x)[0]
    assert_close(live, torch.autograd.grad(f(x), x)[0])


@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(loss_type):
    # At ratio 1 every loss has the gradient -A of its reduction (cispo with its cap above 1).
    x = LOGPS.clone().requires_grad_()
    t = tokens(logps=x, old=LOGPS)
    loss(loss_type, t, CAP).backward()
    weights = torch.ones(6, dtype=torch.float64, requires_grad=True)
    POLICY_LOSSES[loss_type][1](-ADVANTAGES[SEQ] * weights, MASK, SEQ, NORM).backward()
    assert_close(x.grad, weights.grad)


def rollout_loss(loss_type, lengths, group_size, max_length, *, masked=()):
    """Loss on policy with the completion length as reward."""
    rewards = torch.tensor(lengths, dtype=torch.float64)
    advantages = group_relative(rewards[:, None], torch.ones(1), group_size).advantages.double()
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (~torch.isin(seq, torch.tensor(masked, dtype=torch.long))).double()
    logps = torch.full((len(seq),), -1.0, dtype=torch.float64)
    ones = torch.ones_like(logps)
    t = PolicyTokens(logps, ones, logps - logps, advantages[seq], mask, seq, len(lengths))
    count = mask.sum().item()
    norm = Normalizer(len(lengths), count, count, max_length)
    return POLICY_LOSSES[loss_type][1](policy_terms(loss_type, t, PolicyOptions()), mask, seq, norm).item()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    # Sum of A l over 32 tokens, over 8 sequences of up to 6 tokens, and the mean of advantages.
    [("dapo", -0.18748), ("bnpo", -0.18748), ("dr_grpo", -0.12499), ("grpo", 0.0)],
)
def test_completion_length_as_reward(loss_type, expected):
    got = rollout_loss(loss_type, [3, 3, 3, 5, 5, 5, 3, 5], 4, 6)
    assert got == pytest.approx(expected, abs=1e-6 if expected == 0.0 else 6e-6)


def test_truncated_completions_leave_the_denominator_too():
    # A = -+ (l - 2.75) / 1.5001; three sequences of 2 tokens are left.
    assert rollout_loss("dapo", [2, 5, 2, 2], 4, 5, masked=[1]) == pytest.approx(0.75 / 1.5001)
