"""Losses of pairs against numbers worked out by hand.

Two pairs serve most tests: log-ratios 2 and -1 of the chosen, -1 and 1 of the rejected completions, with `beta` 1/2.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from trl.functional.advantages import rank_pairs
from trl.functional.preference import (
    F_DIVERGENCES,
    MAX_EXPONENT,
    PAIR_LOSSES,
    Completions,
    PairOptions,
    Pairs,
    mixture,
    pair_losses,
    ranked_pair_losses,
    scale_tails,
    scores,
    wpo_weights,
)
from trl.functional.reduce import segment_sum

LN2 = math.log(2)
NAN = math.nan


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def expit(x):
    return 1 / (1 + math.exp(-x))


def bump(x):
    """The derivative of `expit`."""
    return expit(x) * expit(-x)


def nls(x):
    """`-log sigmoid(x)`."""
    return math.log1p(math.exp(-x))


PAIRS = Pairs(
    Completions(f64(2, -1), lengths=f64(4, 2), ref_logps=f64(-4, -2), nll=f64(1.5, 0.7)),
    Completions(f64(-1, 1), lengths=f64(2, 4), ref_logps=f64(-2.5, -4), nll=f64(0.3, 0.4)),
)
OPTIONS = PairOptions(beta=0.5, label_smoothing=0.2, discopop_tau=0.5)

# beta r_c = 1 and -1/2, beta r_r = -1/2 and 1/2, beta (r_c - r_r) = 3/2 and -1.
# Averages: 2/4 + 1/2 = 1 and -1/2 - 1/4 = -3/4. 1 / (2 beta) = 1.
# aot: the reference's margins are -3/2 and 2, the policy's 3/2 and 0. Sorted: (0 + 3/2, 3/2 - 2) = (3/2, -1/2).
# aot_unpaired: sorted log-ratios (-1, 2) and (-1, 1), so (0, 1).
EXPECTED = {
    "sigmoid": [nls(1.5), nls(-1)],
    "sigmoid_norm": [nls(0.5), nls(-0.375)],
    "hinge": [0, 2],  # max(0, 1 - 3/2), 1 + 1
    "ipo": [0, 3.0625],  # (1 - 1)^2, (-3/4 - 1)^2
    "exo_pair": [
        expit(1.5) * math.log(expit(1.5) / 0.8) + expit(-1.5) * math.log(expit(-1.5) / 0.2),
        expit(-1) * math.log(expit(-1) / 0.8) + expit(1) * math.log(expit(1) / 0.2),
    ],
    "nca_pair": [nls(1) + nls(-1) / 2 + nls(0.5) / 2, nls(-0.5) + nls(0.5) / 2 + nls(-0.5) / 2],
    "robust": [(0.8 * nls(1.5) - 0.2 * nls(-1.5)) / 0.6, (0.8 * nls(-1) - 0.2 * nls(1)) / 0.6],
    "bco_pair": [nls(1) + nls(0.5), 2 * nls(-0.5)],
    "sppo_hard": [1, 8],  # (2 - 1)^2 + (-1 + 1)^2, (-1 - 1)^2 + (1 + 1)^2
    "aot": [0.8 * nls(0.75) + 0.2 * nls(-0.75), 0.8 * nls(-0.25) + 0.2 * nls(0.25)],
    "aot_unpaired": [LN2, 0.8 * nls(0.5) + 0.2 * nls(-0.5)],
    "apo_zero": [1 - expit(1) + expit(-0.5), 1 - expit(-0.5) + expit(0.5)],
    "apo_down": [expit(1) + 1 - expit(1.5), expit(-0.5) + 1 - expit(-1)],
    # Gates: sigmoid(3) and sigmoid(-2).
    "discopop": [expit(-3) * nls(1.5) + expit(3) * math.exp(-1.5), expit(2) * nls(-1) + expit(-2) * math.exp(1)],
    "sft": [1.5, 0.7],
}
# What the rows of the table say, and which losses know which option.
WHOLE_BATCH = {"aot", "aot_unpaired"}
NO_TIES = {"aot", "aot_unpaired", "sft"}
REVERSE_KL_ONLY = {"nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"}
SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}
AVERAGED = {"sigmoid_norm", "ipo"}
TIED = sorted(set(PAIR_LOSSES) - NO_TIES)


def pairs_of(chosen, rejected, **fields):
    """Pairs of these log-ratios; lengths of 1, log-probs of 0."""
    ones, zeros = torch.ones_like(chosen), torch.zeros_like(chosen)
    values = {"lengths": ones, "ref_logps": zeros, "nll": zeros, **fields}
    return Pairs(Completions(chosen, **values), Completions(rejected, **values))


def random_pairs(count, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 2, count, dtype=dtype, generator=generator) * scale
    lengths = torch.randint(1, 9, (2, count), generator=generator)
    return Pairs(*(Completions(r, n, ref, nll=ref.abs()) for (r, ref), n in zip(values, lengths)))


# ---- values ----


def test_the_table_holds_the_fifteen_losses():
    assert set(PAIR_LOSSES) == set(EXPECTED)
    assert len(PAIR_LOSSES) == 15


@pytest.mark.parametrize("loss_type", EXPECTED)
def test_values(loss_type):
    assert_close(pair_losses(loss_type, PAIRS, OPTIONS), f64(*EXPECTED[loss_type]))


@pytest.mark.parametrize("loss_type", sorted(set(PAIR_LOSSES) - {"sft"}))
def test_where_the_policy_is_its_reference(loss_type):
    # sigmoid(0) = 1/2 and 1 / (2 beta) = 1. KL((1/2, 1/2) || (4/5, 1/5)) = -(ln 4/5 + ln 1/5) / 2 - ln 2.
    # robust: (4/5 - 1/5) ln 2 / (3/5).
    special = {
        "hinge": 1.0,
        "ipo": 1.0,
        "exo_pair": -math.log(0.16) / 2 - LN2,
        "nca_pair": 2 * LN2,
        "bco_pair": 2 * LN2,
        "sppo_hard": 2.0,
        "apo_zero": 1.0,
        "apo_down": 1.0,
        "discopop": LN2 / 2 + 1 / 2,
    }
    equal = Pairs(*(replace(side, log_ratios=f64(0, 0)) for side in (PAIRS.chosen, PAIRS.rejected)))
    expected = special.get(loss_type, LN2)
    assert_close(pair_losses(loss_type, equal, OPTIONS), f64(expected, expected))


# ---- gradients ----


def sorted_slope(d):
    """The derivative of `0.8 nls(d / 2) + 0.2 nls(-d / 2)`."""
    return 0.5 * (-0.8 * expit(-d / 2) + 0.2 * expit(d / 2))


def margin_slope(x, y):
    """The derivative of `discopop` by `x`, whose gate has the slope `y`."""
    g = expit(x / 0.5)
    return -y * nls(x) - (1 - g) * expit(-x) + (y - g) * math.exp(-x)


# By the chosen and by the rejected log-ratios of the two pairs; x = beta D is 3/2 and -1.
GRADIENTS = {
    # d/dx -log sigmoid(x) = -sigmoid(-x).
    "sigmoid": ([-0.5 * expit(-1.5), -0.5 * expit(1)], [0.5 * expit(-1.5), 0.5 * expit(1)]),
    # ... times beta over the length.
    "sigmoid_norm": (
        [-0.5 / 4 * expit(-0.5), -0.5 / 2 * expit(0.375)],
        [0.5 / 2 * expit(-0.5), 0.5 / 4 * expit(0.375)],
    ),
    "hinge": ([0, -0.5], [0, 0.5]),
    # 2 (average margin - 1) over the length.
    "ipo": ([0, 2 * -1.75 / 2], [0, 2 * 1.75 / 4]),
    # d/dx KL = sigmoid'(x) (x - ln 4): the minimum is where the odds are those of the labels.
    "exo_pair": (
        [0.5 * bump(1.5) * (1.5 - math.log(4)), 0.5 * bump(1) * (-1 - math.log(4))],
        [-0.5 * bump(1.5) * (1.5 - math.log(4)), 0.5 * bump(1) * (1 + math.log(4))],
    ),
    "nca_pair": (
        [-0.5 * expit(-1) + 0.25 * expit(1), -0.5 * expit(0.5) + 0.25 * expit(-0.5)],
        [0.25 * expit(-0.5), 0.25 * expit(0.5)],
    ),
    "robust": (
        [-0.5 * (0.8 * expit(-1.5) + 0.2 * expit(1.5)) / 0.6, -0.5 * (0.8 * expit(1) + 0.2 * expit(-1)) / 0.6],
        [0.5 * (0.8 * expit(-1.5) + 0.2 * expit(1.5)) / 0.6, 0.5 * (0.8 * expit(1) + 0.2 * expit(-1)) / 0.6],
    ),
    "bco_pair": ([-0.5 * expit(-1), -0.5 * expit(0.5)], [0.5 * expit(-0.5), 0.5 * expit(0.5)]),
    "sppo_hard": ([2, -4], [0, 4]),
    # The first pair has the larger policy margin, 3/2, and so the second rank.
    "aot": ([sorted_slope(-0.5), sorted_slope(1.5)], [-sorted_slope(-0.5), -sorted_slope(1.5)]),
    # Chosen 2 and -1 are ranks 2 and 1, rejected -1 and 1 are ranks 1 and 2.
    "aot_unpaired": ([sorted_slope(1), sorted_slope(0)], [-sorted_slope(0), -sorted_slope(1)]),
    "apo_zero": ([-0.5 * bump(1), -0.5 * bump(0.5)], [0.5 * bump(0.5), 0.5 * bump(0.5)]),
    "apo_down": ([0.5 * (bump(1) - bump(1.5)), 0.5 * (bump(0.5) - bump(1))], [0.5 * bump(1.5), 0.5 * bump(1)]),
    "discopop": (
        [0.5 * margin_slope(1.5, bump(3) / 0.5), 0.5 * margin_slope(-1, bump(2) / 0.5)],
        [-0.5 * margin_slope(1.5, bump(3) / 0.5), -0.5 * margin_slope(-1, bump(2) / 0.5)],
    ),
}


def with_gradients(pairs):
    """The pairs with log-ratios that require gradients, and these."""
    leaves = [side.log_ratios.clone().requires_grad_() for side in (pairs.chosen, pairs.rejected)]
    return Pairs(replace(pairs.chosen, log_ratios=leaves[0]), replace(pairs.rejected, log_ratios=leaves[1])), leaves


@pytest.mark.parametrize("loss_type", GRADIENTS)
def test_gradients_in_closed_form(loss_type):
    pairs, leaves = with_gradients(PAIRS)
    pair_losses(loss_type, pairs, OPTIONS).sum().backward()
    for leaf, expected in zip(leaves, GRADIENTS[loss_type]):
        assert_close(leaf.grad, f64(*expected))


def test_the_gradient_of_sft():
    nll = f64(1.5, 0.7).requires_grad_()
    pairs = Pairs(replace(PAIRS.chosen, nll=nll), replace(PAIRS.rejected, nll=None))
    pair_losses("sft", pairs, OPTIONS).sum().backward()
    assert nll.grad.tolist() == [1.0, 1.0]


# ---- options ----


def changes(loss_type, pairs=PAIRS, **options):
    """Whether the options change the loss."""
    here, there = (pair_losses(loss_type, p, o) for p, o in ((PAIRS, OPTIONS), (pairs, replace(OPTIONS, **options))))
    return not torch.equal(here, there)


def test_which_losses_know_which_option():
    shorter = Pairs(*(replace(side, lengths=f64(1, 1)) for side in (PAIRS.chosen, PAIRS.rejected)))
    assert {name for name in PAIR_LOSSES if changes(name, label_smoothing=0.1)} == SMOOTHED
    assert {name for name in PAIR_LOSSES if changes(name, shorter)} == AVERAGED
    assert {name for name in PAIR_LOSSES if changes(name, beta=0.4)} == set(PAIR_LOSSES) - {"sft"}
    assert {name for name in PAIR_LOSSES if changes(name, discopop_tau=0.1)} == {"discopop"}


def test_losses_of_averages_with_lengths_of_one_are_losses_of_sums():
    pairs = Pairs(*(replace(side, lengths=f64(1, 1)) for side in (PAIRS.chosen, PAIRS.rejected)))
    assert_close(pair_losses("ipo", pairs, OPTIONS), f64((3 - 1) ** 2, (-2 - 1) ** 2))
    assert torch.equal(pair_losses("sigmoid_norm", pairs, OPTIONS), pair_losses("sigmoid", pairs, OPTIONS))


@pytest.mark.parametrize("loss_type", sorted(AVERAGED))
def test_a_completion_without_tokens_has_the_average_0(loss_type):
    lengths = torch.tensor([0, 2])
    pairs, leaves = with_gradients(pairs_of(f64(0, 2), f64(0, 0), lengths=lengths))
    got = pair_losses(loss_type, pairs, OPTIONS)
    assert_close(got, f64(*{"ipo": [1, 0], "sigmoid_norm": [LN2, nls(0.5)]}[loss_type]))
    got.sum().backward()
    assert leaves[0].grad.isfinite().all()


@pytest.mark.parametrize("margin", [-7.0, 0.0, 0.3, 40.0])
def test_robust_is_without_bias(margin):
    """Of labels that are wrong one time in five, the mean loss is that of the right ones."""
    right, wrong = (pairs_of(f64(m), f64(0)) for m in (margin, -margin))
    mean = 0.8 * pair_losses("robust", right, OPTIONS) + 0.2 * pair_losses("robust", wrong, OPTIONS)
    assert_close(mean, f64(nls(margin / 2)))


def test_exo_is_0_at_the_odds_of_the_labels():
    # beta D = ln 4: sigmoid is 4/5.
    assert_close(pair_losses("exo_pair", pairs_of(f64(2 * math.log(4)), f64(0)), OPTIONS), f64(0))


def test_exo_needs_labels_that_may_be_wrong():
    with pytest.raises(AssertionError, match="infinite"):
        pair_losses("exo_pair", PAIRS, PairOptions())


# ---- batches ----


@pytest.mark.parametrize("loss_type", sorted(set(PAIR_LOSSES) - WHOLE_BATCH))
def test_a_pair_has_the_same_loss_in_any_company(loss_type):
    pairs, order = random_pairs(12), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    whole = pair_losses(loss_type, pairs, OPTIONS)
    pieces = [
        pair_losses(loss_type, Pairs(pairs.chosen.select(rows), pairs.rejected.select(rows)), OPTIONS)
        for rows in order.split(5)
    ]
    assert_close(torch.cat(pieces), whole[order], rtol=1e-12, atol=0)
    assert not PAIR_LOSSES[loss_type].whole_batch


def permuted(pairs, chosen_rows, rejected_rows):
    return Pairs(pairs.chosen.select(chosen_rows), pairs.rejected.select(rejected_rows))


@pytest.mark.parametrize("loss_type", sorted(WHOLE_BATCH))
def test_sorted_losses_do_not_know_the_order_of_pairs_but_their_company(loss_type):
    pairs = random_pairs(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    whole = pair_losses(loss_type, pairs, OPTIONS)
    assert torch.equal(pair_losses(loss_type, permuted(pairs, order, order), OPTIONS), whole)
    halves = [pair_losses(loss_type, permuted(pairs, rows, rows), OPTIONS).mean() for rows in order.chunk(2)]
    assert abs(sum(halves) / 2 - whole.mean()) > 1e-3
    assert PAIR_LOSSES[loss_type].whole_batch


def test_only_unpaired_aot_does_not_know_which_two_are_a_pair():
    pairs, rows = random_pairs(12), torch.arange(12)
    mixed = permuted(pairs, rows, rows.roll(1))
    assert torch.equal(pair_losses("aot_unpaired", mixed, OPTIONS), pair_losses("aot_unpaired", pairs, OPTIONS))
    assert abs(pair_losses("aot", mixed, OPTIONS).mean() - pair_losses("aot", pairs, OPTIONS).mean()) > 1e-3


def test_select_keeps_what_there_is():
    got = PAIRS.chosen.select(torch.tensor([1, 0, 1]))
    assert [v.tolist() for v in (got.log_ratios, got.lengths, got.ref_logps, got.nll)] == [
        [-1, 2, -1],
        [2, 4, 2],
        [-2, -4, -2],
        [0.7, 1.5, 0.7],
    ]
    bare = Completions(f64(1, 2), f64(3, 4)).select(torch.tensor([1]))
    assert (bare.ref_logps, bare.nll) == (None, None)


# ---- divergences ----


def score(name, r, alpha=0.5):
    o = PairOptions(f_divergence_type=name, f_alpha_divergence_coef=alpha)
    return scores(Completions(r, torch.ones_like(r)), o)


@pytest.mark.parametrize(
    ("name", "alpha", "expected"),
    [
        # At r = ln 2, where the ratio of the probabilities is 2.
        ("reverse_kl", 0.5, LN2),
        ("forward_kl", 0.5, 1 / 2),  # 1 - 1/2
        ("js_divergence", 0.5, math.log(4 / 3)),  # ln 2 + ln 2/3
        ("alpha_divergence", 0.5, 2 - math.sqrt(2)),  # (2^(-1/2) - 1) / (-1/2)
        ("alpha_divergence", 2.0, 1.0),  # 2 - 1
        ("alpha_divergence", 3.0, 1.5),  # (2^2 - 1) / 2
        ("alpha_divergence", 0.0, 1 / 2),
        ("alpha_divergence", -1.0, 0.375),  # (2^(-2) - 1) / (-2)
        ("alpha_divergence", 1.0, LN2),
    ],
)
def test_scores(name, alpha, expected):
    assert_close(score(name, f64(LN2, 0), alpha), f64(expected, 0))


# The divergence of p to q is the mean over q of f(p / q).
GENERATORS = {
    "reverse_kl": lambda u, _: u * u.log(),
    "forward_kl": lambda u, _: -u.log(),
    "js_divergence": lambda u, _: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
    "alpha_divergence": lambda u, a: (u**a - a * u - (1 - a)) / (a * (a - 1)),
}


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.7])
@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_scores_are_the_slope_of_the_divergence(name, alpha):
    r = torch.linspace(-6, 6, 25, dtype=torch.float64)
    ratios = torch.cat([r.exp(), f64(1)]).requires_grad_()
    GENERATORS[name](ratios, alpha).sum().backward()
    slopes, at_one = ratios.grad[:-1], ratios.grad[-1]
    assert_close(score(name, r, alpha), slopes - at_one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("off", [1e-3, 1e-6, 1e-12, -1e-12, -1e-6, -1e-3])
def test_alpha_towards_1_is_the_reverse_kl(dtype, off):
    # (e^(h r) - 1) / h = r + h r^2 / 2 + ..., and r^2 / 2 is at most 50.
    r = torch.linspace(-10, 10, 41, dtype=dtype)
    assert_close(score("alpha_divergence", r, 1 + off), r, rtol=1e-5, atol=51 * abs(off))


def test_reverse_kl_is_plain_dpo():
    pairs = random_pairs(20)
    expected = -torch.nn.functional.logsigmoid(0.5 * (pairs.chosen.log_ratios - pairs.rejected.log_ratios))
    for options in ({}, {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}):
        assert torch.equal(pair_losses("sigmoid", pairs, replace(OPTIONS, **options)), expected)


def test_a_loss_of_other_scores():
    # Forward KL at r = (ln 2, -ln 2): scores 1 - 1/2 and 1 - 2, so D = 3/2.
    options = replace(OPTIONS, f_divergence_type="forward_kl")
    pairs = pairs_of(f64(LN2), f64(-LN2), lengths=f64(2))
    assert_close(pair_losses("sigmoid", pairs, options), f64(nls(0.75)))
    assert_close(pair_losses("hinge", pairs, options), f64(0.25))
    assert_close(pair_losses("ipo", pairs, options), f64((0.75 - 1) ** 2))


def test_which_losses_know_other_divergences():
    for name, row in PAIR_LOSSES.items():
        assert row.reverse_kl_only == (name in REVERSE_KL_ONLY)
        if name not in REVERSE_KL_ONLY | {"sft"}:
            assert changes(name, f_divergence_type="js_divergence"), name


@pytest.mark.parametrize("loss_type", sorted(REVERSE_KL_ONLY))
def test_losses_of_log_ratios_refuse_other_divergences(loss_type):
    options = replace(OPTIONS, f_divergence_type="forward_kl")
    with pytest.raises(AssertionError, match=f"'{loss_type}' does not know 'forward_kl'"):
        pair_losses(loss_type, PAIRS, options)


# ---- extreme values ----

EXTREMES = [-1e4, -300.0, -90.0, -31.0, -1e-6, 0.0, 1e-6, 31.0, 90.0, 300.0, 1e4]


@pytest.mark.parametrize("f_divergence_type", F_DIVERGENCES)
@pytest.mark.parametrize("loss_type", GRADIENTS)
def test_extreme_log_ratios_have_finite_losses_and_gradients(loss_type, f_divergence_type):
    if f_divergence_type != "reverse_kl" and loss_type in REVERSE_KL_ONLY:
        return
    grid = torch.cartesian_prod(*[torch.tensor(EXTREMES)] * 2)
    for tau, alpha in ((0.05, 0.5), (5.0, 3.0)):
        o = PairOptions(0.5, 0.2, f_divergence_type, alpha, tau)
        pairs, leaves = with_gradients(pairs_of(*grid.unbind(1)))
        losses = pair_losses(loss_type, pairs, o)
        losses.sum().backward()
        assert losses.isfinite().all()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # x = beta D is -1e4, then 1e4, with r_c = +-1e4 and r_r = -r_c.
        ("sigmoid", [1e4, 0]),
        ("hinge", [1e4 + 1, 0]),
        ("exo_pair", [-math.log(0.2), -math.log(0.8)]),
        ("nca_pair", [5e3 + 2.5e3, 2.5e3]),
        ("robust", [0.8 * 1e4 / 0.6, -0.2 * 1e4 / 0.6]),
        ("bco_pair", [1e4, 0]),
        ("apo_zero", [2, 0]),
        ("apo_down", [1, 1]),
        ("discopop", [1e4, 0]),
    ],
)
def test_limits(loss_type, expected):
    pairs = pairs_of(torch.tensor([-1e4, 1e4]), torch.tensor([1e4, -1e4]))
    assert_close(pair_losses(loss_type, pairs, OPTIONS), torch.tensor(expected).float())


def test_an_exponential_goes_on_as_its_tangent():
    # At r = -40 the exponent of the forward KL is 10 beyond the bound: 1 - e^30 (1 + 10), with the slope e^30.
    r = f64(-40, -30, 25).requires_grad_()
    got = score("forward_kl", r)
    got.sum().backward()
    top = math.exp(MAX_EXPONENT)
    assert MAX_EXPONENT == 30
    assert_close(got, f64(1 - 11 * top, 1 - top, 1 - math.exp(-25)))
    assert_close(r.grad, f64(top, top, math.exp(-25)))


# ---- mixtures ----


def test_a_mixture_is_the_weighted_sum():
    pairs, leaves = with_gradients(PAIRS)
    total, parts = mixture(["sigmoid", "bco_pair", "sft"], [0.8, 0.25, 2.0], pairs, OPTIONS)
    names = ("sigmoid", "bco_pair", "sft")
    assert tuple(parts) == names
    for name in names:
        assert_close(parts[name], f64(*EXPECTED[name]))
    by_name = [EXPECTED[name] for name in names]
    assert_close(total, f64(*(0.8 * a + 0.25 * b + 2 * c for a, b, c in zip(*by_name))))
    total.sum().backward()
    by_sigmoid, by_bco = GRADIENTS["sigmoid"][0], GRADIENTS["bco_pair"][0]
    assert_close(leaves[0].grad, f64(*(0.8 * a + 0.25 * b for a, b in zip(by_sigmoid, by_bco))))


def test_without_weights_a_mixture_is_the_sum():
    total, _ = mixture(["hinge", "sppo_hard"], None, PAIRS, OPTIONS)
    assert total.tolist() == [0 + 1, 2 + 8]
    alone, parts = mixture(["sigmoid"], None, PAIRS, OPTIONS)
    assert torch.equal(alone, parts["sigmoid"])


@pytest.mark.parametrize(
    ("names", "weights"), [([], None), (["sigmoid"], [1.0, 2.0]), (["sigmoid", "sigmoid"], None), (["sigmoid"], [])]
)
def test_a_mixture_has_different_losses_and_a_weight_each(names, weights):
    with pytest.raises(AssertionError):
        mixture(names, weights, PAIRS, OPTIONS)


# ---- pairs that are ranked, and ties ----


def ranked(loss_type, margins, preference, beta):
    """The loss of pairs of log-ratios `margins` and 0, summed over tokens."""
    pairs = pairs_of(margins, torch.zeros_like(margins))
    return ranked_pair_losses(loss_type, pairs, preference, PairOptions(beta, label_smoothing=0.2))


def slope(loss_type, margin, preference, beta):
    m = f64(margin).requires_grad_()
    ranked(loss_type, m, f64(preference), beta).sum().backward()
    return m.grad.item()


@pytest.mark.parametrize(
    ("margin", "preference", "expected"),
    [
        (0.0, 1.0, LN2),
        (0.0, -1.0, LN2),
        # beta m = 1 in favour of the better one, and of the worse: ln(1 + 1/e) and ln(1 + e).
        (10.0, 1.0, 0.313262),
        (-10.0, -1.0, 0.313262),
        (-10.0, 1.0, 1.313262),
        (10.0, -1.0, 1.313262),
        # A tie: half of each.
        (0.0, 0.0, LN2),
        (10.0, 0.0, 0.813262),
        (-10.0, 0.0, 0.813262),
    ],
)
def test_ranked_sigmoid(margin, preference, expected):
    assert_close(ranked("sigmoid", f64(margin), f64(preference), 0.1), f64(expected), rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("margin", "preference", "expected"),
    [
        # 1 / (2 beta) = 5: (3 - 5)^2, (3 + 5)^2, (-3 + 5)^2.
        (3.0, 1.0, 4.0),
        (3.0, -1.0, 64.0),
        (-3.0, -1.0, 4.0),
        (5.0, 1.0, 0.0),
        # A tie: m^2.
        (3.0, 0.0, 9.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_ranked_ipo(margin, preference, expected):
    assert_close(ranked("ipo", f64(margin), f64(preference), 0.1), f64(expected))


@pytest.mark.parametrize("margin", [-7.0, 0.0, 2.0, 30.0])
def test_ranked_gradients_in_closed_form(margin):
    beta = 0.3
    # d/dm -log sigmoid(beta m) = -beta sigmoid(-beta m).
    assert_close(slope("sigmoid", margin, 1.0, beta), -beta * expit(-beta * margin))
    assert_close(slope("sigmoid", margin, -1.0, beta), beta * expit(beta * margin))
    # The mean of both is beta / 2 (sigmoid(beta m) - sigmoid(-beta m)) = beta / 2 tanh(beta m / 2).
    assert_close(slope("sigmoid", margin, 0.0, beta), beta / 2 * math.tanh(beta * margin / 2))
    for preference in (1.0, -1.0, 0.0):
        assert_close(slope("ipo", margin, preference, beta), 2 * (margin - preference / 0.6))


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_tie_pulls_towards_equal_log_ratios(loss_type):
    assert slope(loss_type, 0.0, 0.0, 0.1) == 0.0
    assert slope(loss_type, 2.0, 0.0, 0.1) > 0
    assert slope(loss_type, -2.0, 0.0, 0.1) < 0


@pytest.mark.parametrize("loss_type", TIED)
def test_a_tie_has_the_mean_gradient_of_both_orders(loss_type):
    both = (slope(loss_type, 1.7, 1.0, 0.1) + slope(loss_type, 1.7, -1.0, 0.1)) / 2
    assert_close(slope(loss_type, 1.7, 0.0, 0.1), both)


def test_a_tie_in_sppo_has_no_target():
    pairs = pairs_of(f64(3), f64(-2))
    assert ranked_pair_losses("sppo_hard", pairs, f64(0), OPTIONS).tolist() == [9 + 4]


@pytest.mark.parametrize("loss_type", sorted(NO_TIES))
def test_losses_without_ties_do_not_rank(loss_type):
    with pytest.raises(AssertionError, match=f"'{loss_type}' does not say what a tie costs"):
        ranked_pair_losses(loss_type, PAIRS, f64(1, 1), OPTIONS)


@pytest.mark.parametrize("loss_type", TIED)
def test_ranked_losses_are_those_of_pairs_in_order(loss_type):
    assert ranked_pair_losses(loss_type, PAIRS, f64(1, 1), OPTIONS).tolist() == pytest.approx(EXPECTED[loss_type])
    turned = ranked_pair_losses(loss_type, PAIRS.swapped, f64(-1, -1), OPTIONS)
    assert turned.tolist() == pytest.approx(EXPECTED[loss_type])


@pytest.mark.parametrize("loss_type", TIED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swapping_the_completions_changes_nothing(loss_type, dtype):
    pairs = random_pairs(50, dtype, scale=20.0)
    ranks = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [NAN, 0.0], [3.0, 2.0]]).repeat(10, 1)
    here = ranked_pair_losses(loss_type, pairs, rank_pairs(ranks).double(), OPTIONS)
    there = ranked_pair_losses(loss_type, pairs.swapped, rank_pairs(ranks.flip(1)), OPTIONS)
    assert here.dtype == dtype
    assert here.tolist() == there.tolist()


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_pair_without_preference_costs_nothing(loss_type):
    margins = f64(3.0, 3.0, -4.0).requires_grad_()
    got = ranked(loss_type, margins, torch.tensor([NAN, 1.0, NAN]), 0.1)
    got.sum().backward()
    assert got[[0, 2]].tolist() == [0.0, 0.0]
    assert margins.grad[[0, 2]].tolist() == [0.0, 0.0]
    assert got[1] > 0
    assert margins.grad[1] < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranked_sigmoid_of_large_margins(dtype):
    margins = torch.tensor([1e5, -1e5, 1e5, -1e5, 1e5, -1e5], dtype=dtype, requires_grad=True)
    got = ranked("sigmoid", margins, torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0]), 0.1)
    # beta m = +-1e4: nothing, all of it, and half of it.
    assert_close(got, torch.tensor([0.0, 1e4, 1e4, 0.0, 5e3, 5e3], dtype=dtype))
    got.sum().backward()
    assert_close(margins.grad, torch.tensor([0.0, -0.1, 0.1, 0.0, 0.05, -0.05], dtype=dtype))


# ---- weights of tokens and of completions ----

# Pairs (0, 1) and (2, 3): of 3 and 1, and of 2 and 4 loss tokens. Masked tokens count for no length.
SEQ = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
MASK = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1]).bool()
VALUES = f64(1, 2, 4, 100, 8, 16, 100, 32, 1, 2, 4, 8)
SHARED = torch.tensor([1, 1, 2, 2])


def test_tails_are_scaled():
    got = scale_tails(VALUES, MASK, SEQ, SHARED, 0.5)
    assert got[MASK].tolist() == [1, 1, 2, 8, 16, 32, 1, 2, 2, 4]
    # 1 + (2 + 4) / 2, 8, 16 + 32, 1 + 2 + (4 + 8) / 2
    assert segment_sum(got * MASK, SEQ, 4).tolist() == [4, 8, 48, 9]


@pytest.mark.parametrize(("ld_alpha", "sums"), [(1.0, [7, 8, 48, 15]), (0.0, [1, 8, 48, 3])])
def test_tails_in_full_and_cut_off(ld_alpha, sums):
    assert segment_sum(scale_tails(VALUES, MASK, SEQ, SHARED, ld_alpha) * MASK, SEQ, 4).tolist() == sums


def test_completions_without_tokens_have_no_tails():
    # Sequences 0, 2 and 3 have no tokens; what 1 shares with its pair is nothing.
    seq, mask = torch.tensor([1, 1]), torch.tensor([True, True])
    assert scale_tails(f64(2, 4), mask, seq, torch.tensor([0, 0, 0, 0]), 0.25).tolist() == [0.5, 1.0]


def test_the_gradient_of_a_tail_is_scaled():
    values = VALUES.clone().requires_grad_()
    (scale_tails(values, MASK, SEQ, SHARED, 0.3) * MASK).sum().backward()
    assert_close(values.grad[MASK], f64(1, 0.3, 0.3, 1, 1, 1, 1, 1, 0.3, 0.3))


def test_wpo_weights():
    """1/2 out of (1/2, 1/2), whose squares sum to 1/2: 1. Of (1/4, 3/4) with 5/8 the first is 2/5, the other 6/5."""
    logps = f64(0.5, 0.25, 0.75, 0.01, 0.25).log().requires_grad_()
    log_sum_sq_probs = f64(0.5, 0.625, 0.625, 0.9, 0.625).log()
    mask, seq = torch.tensor([1, 1, 1, 0, 1]).bool(), torch.tensor([0, 0, 1, 1, 2])
    got = wpo_weights(logps, log_sum_sq_probs, mask, seq, 4)
    assert_close(got, f64(math.sqrt(1 * 0.4), 1.2, 0.4, 1.0))
    assert not got.requires_grad
