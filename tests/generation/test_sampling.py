"""From logits to the next token: the processed distributions are transformers', the draw is the distribution's."""

import pytest
import torch
from fixtures.models import random_model
from torch.testing import assert_close
from transformers import GenerationConfig

from trl.errors import ConfigError
from trl.generation.sampling import Sampler, resolve
from trl.types import Sampling

PROMPT = [10, 11, 12, 10, 11]

# Settings as transformers' GenerationConfig names them.
SETTINGS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.4},
    "all of them": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "penalty and temperature": {"repetition_penalty": 1.7, "temperature": 0.5, "top_k": 7},
    "sequence_bias": {"sequence_bias": {(13,): 2.0, (11, 14): 5.0}},
    "bias before penalty": {"sequence_bias": {(10,): 3.0, (11,): -3.0}, "repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[20], [11, 12]]},
    "suppress_tokens": {"suppress_tokens": [20, 21]},
    "min_new_tokens": {"min_new_tokens": 3},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "shapes": {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "temperature": 0.8, "top_p": 0.95},
    "everything at once": {
        "sequence_bias": {(10,): 3.0}, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "bad_words_ids": [[20]],
        "suppress_tokens": [22], "min_new_tokens": 2, "temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.05,
    },
}  # fmt: skip
OWN_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_of(settings) -> Sampling:
    own = {k: v for k, v in settings.items() if k in OWN_FIELDS}
    return resolve(Sampling(**own, extra={k: v for k, v in settings.items() if k not in OWN_FIELDS}))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_processed_distributions_are_those_of_transformers(settings):
    torch.manual_seed(0)
    config = GenerationConfig(
        do_sample=True, max_new_tokens=5, eos_token_id=[1, 9], pad_token_id=0, **{"top_k": 0, **settings}
    )
    output = random_model().generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 5, dtype=torch.long), generation_config=config,
        output_scores=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    sampler = Sampler(sampling_of(settings), [1, 9])
    assert sampler.needs_history is bool({*settings} - {*OWN_FIELDS[:4], "min_new_tokens", "typical_p",
                                                        "epsilon_cutoff", "eta_cutoff"})  # fmt: skip
    ids = output.sequences[0].tolist()
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        history = [ids[: 5 + step]] if sampler.needs_history else None
        assert_close(sampler.process(logits.clone(), step, history), scores)


def test_settings_change_the_distribution():
    # The comparison above would hold between two empty lists of processors.
    logits = random_model()(input_ids=torch.tensor([PROMPT])).logits[0, -1:].detach()
    for name, settings in SETTINGS.items():
        sampler = Sampler(sampling_of(settings), [1, 9])
        history = [PROMPT] if sampler.needs_history else None
        assert not torch.equal(sampler.process(logits.clone(), 0, history), logits), name


def test_history_of_rows_of_different_length_is_not_padded():
    rows = [[10, 11], [12], [10, 13, 14]]
    sampler = Sampler(resolve(Sampling(repetition_penalty=2.0)), [1])
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    got = sampler.process(logits.clone(), 0, rows)
    expected = logits.clone()
    for row, seen in enumerate(rows):
        for token in seen:
            x = logits[row, token]
            expected[row, token] = x / 2 if x > 0 else x * 2
    assert_close(got, expected)


def test_fields_in_extra_win():
    extra = {"temperature": 0.5, "max_new_tokens": 7, "top_k": 3, "repetition_penalty": 1.1, "min_new_tokens": 2}
    got = resolve(Sampling(temperature=0.9, max_tokens=100, extra=extra))
    expected = Sampling(temperature=0.5, max_tokens=7, top_k=3, repetition_penalty=1.1, extra={"min_new_tokens": 2})
    assert got == expected
    assert resolve(Sampling(n=3)) == Sampling(n=3)


@pytest.mark.parametrize(("do_sample", "temperature"), [(False, 0.0), (True, 0.7)])
def test_do_sample(do_sample, temperature):
    assert resolve(Sampling(temperature=0.7, extra={"do_sample": do_sample})).temperature == temperature


def test_an_unknown_setting_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"`num_beams`, `topp`, which .* It has: .*top_p") as error:
        resolve(Sampling(extra={"topp": 0.9, "num_beams": 4, "top_k": 1}))
    assert "generation_kwargs" in str(error.value)


def test_end_of_sequence_is_forbidden_early_on():
    sampler = Sampler(resolve(Sampling(extra={"min_new_tokens": 2})), [1, 5])
    for step, forbidden in enumerate([True, True, False]):
        logits = sampler.process(torch.zeros(2, 8), step)
        assert torch.isinf(logits[:, [1, 5]]).all().item() is forbidden
        assert torch.isfinite(logits[:, [0, 2, 3, 4, 6, 7]]).all()


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("vocabulary", [3, 64, 65, 1000])
def test_draws_follow_the_distribution(vocabulary):
    torch.manual_seed(0)
    logits = torch.randn(vocabulary)
    rows = 20_000
    tokens, logps = Sampler(Sampling(), [1]).draw(logits.expand(rows, -1))
    log_p = logits.log_softmax(0)
    assert_close(logps, log_p[tokens])
    statistic = chi_square(torch.bincount(tokens, minlength=vocabulary), log_p.exp())
    freedom = vocabulary - 1
    # Mean and deviation of a chi-square variable; four deviations.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_rows_are_drawn_independently():
    torch.manual_seed(0)
    tokens, _ = Sampler(Sampling(), [1]).draw(torch.zeros(10_000, 2))
    pairs = torch.bincount(2 * tokens[0::2] + tokens[1::2], minlength=4)
    assert chi_square(pairs, torch.full((4,), 0.25)) < 16.3


def test_what_has_no_probability_is_never_drawn():
    torch.manual_seed(0)
    logits = torch.full((5000, 200), -torch.inf)
    logits[:, [0, 63, 64, 130, 199]] = torch.randn(5)
    tokens, logps = Sampler(Sampling(), [1]).draw(logits)
    assert set(tokens.tolist()) == {0, 63, 64, 130, 199}
    assert torch.isfinite(logps).all()


def test_temperature_zero_takes_the_most_probable():
    logits = torch.tensor([[0.1, 0.5, 0.2], [3.0, 1.0, 2.0]])
    tokens, logps = Sampler(Sampling(temperature=0.0), [1]).draw(logits)
    assert tokens.tolist() == [1, 0]
    assert_close(logps, logits.log_softmax(1).amax(1))


def test_the_seed_decides():
    def draw(seed):
        torch.manual_seed(seed)
        return Sampler(Sampling(), [1]).draw(torch.zeros(20, 64))[0].tolist()

    assert draw(0) == draw(0) != draw(1)
