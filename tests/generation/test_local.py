"""Completions from the model itself: those that its own `generate` writes, each prompt computed once."""

import math
from collections import Counter

import pytest
import torch
from fixtures.batches import make_batch
from fixtures.models import CHAIN_S, CHAIN_T, chain_logp, family_model, random_model, table_model
from torch.testing import assert_close

from trl.errors import ConfigError, GenerationError
from trl.generation.local import LocalEngine
from trl.models.forward import token_logps
from trl.types import Prompt, Sampling

RAGGED = [[10, 11, 12], [40], [20, 21, 22, 23, 24, 25, 26, 27], [33, 10]]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "mixtral", "granite", "cohere"]
UNPACKED_FAMILIES = ["qwen2", "gemma2", "lfm2"]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
both_ways = pytest.mark.parametrize("shared_prompts", [True, False])


def complete(engine, prompts, sampling):
    """Completions in the order of the prompts."""
    got = dict(engine.generate([Prompt(ids) for ids in prompts], sampling))
    assert sorted(got) == list(range(len(prompts)))
    return [got[i] for i in range(len(prompts))]


def engine_for(model, *, eos_ids=(1,), shared_prompts=True):
    return LocalEngine(model, eos_ids=eos_ids, shared_prompts=shared_prompts)


def generate_alone(model, ids, eos_ids, max_tokens):
    """What the model's own greedy `generate` writes after one prompt."""
    output = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        max_new_tokens=max_tokens, eos_token_id=list(eos_ids), pad_token_id=0,
    )  # fmt: skip
    return output[0, len(ids) :].tolist()


@pytest.fixture
def forward_rows():
    """Hooks a model; returns the list of the shapes of `input_ids` it was called with."""

    def hook(model):
        seen = []
        model.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return seen

    return hook


class TestGreedy:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_shared_prompts(self, family):
        self.compare(family_model(family, packed=True), family_model(family), shared_prompts=True)

    @pytest.mark.parametrize("family", UNPACKED_FAMILIES)
    def test_own_generate(self, family):
        self.compare(family_model(family), family_model(family), shared_prompts=False)

    def compare(self, model, plain, shared_prompts):
        # Ids that the model does write end some rows early.
        eos_ids = sorted({generate_alone(plain, ids, [], 12)[place] for ids, place in zip(RAGGED, (3, 11, 6, 0))})
        got = complete(engine_for(model, eos_ids=eos_ids, shared_prompts=shared_prompts), RAGGED, GREEDY)
        expected = [generate_alone(plain, ids, eos_ids, 12) for ids in RAGGED]
        assert [c.token_ids for (c,) in got] == expected
        assert len({len(ids) for ids in expected}) > 1
        for (c,) in got:
            assert c.finish_reason == ("stop" if c.token_ids[-1] in eos_ids else "length")

    @both_ways
    def test_a_greedy_setting_of_transformers(self, shared_prompts):
        model = random_model(packed=True)
        engine = engine_for(model, shared_prompts=shared_prompts)
        sampling = Sampling(max_tokens=99, extra={"do_sample": False, "max_new_tokens": 12})
        assert complete(engine, RAGGED, sampling) == complete(engine, RAGGED, GREEDY)

    @both_ways
    def test_the_models_own_sampling_defaults_stay_out(self, shared_prompts):
        expected = complete(engine_for(random_model(packed=True)), RAGGED, GREEDY)
        model = random_model(packed=True)
        model.generation_config.repetition_penalty = 5.0
        model.generation_config.suppress_tokens = list(range(30))
        got = complete(engine_for(model, shared_prompts=shared_prompts), RAGGED, GREEDY)
        assert [c.token_ids for (c,) in got] == [c.token_ids for (c,) in expected]
        assert model.generation_config.repetition_penalty == 5.0


class TestDistribution:
    # Temperature 1/2 squares and renormalises: 25, 9 and 4 of 38.
    @both_ways
    @pytest.mark.parametrize(("temperature", "shares"), [(1.0, [0.5, 0.3, 0.2]), (0.5, [25 / 38, 9 / 38, 4 / 38])])
    def test_of_single_tokens(self, shared_prompts, temperature, shares):
        torch.manual_seed(0)
        chain = {10: {11: 0.5, 12: 0.3, 13: 0.2}, 11: {1: 1.0}, 12: {1: 1.0}, 13: {1: 1.0}}
        engine = engine_for(table_model(chain, packed=True), shared_prompts=shared_prompts)
        n = 4000
        (completions,) = complete(engine, [[20, 10]], Sampling(n=n, max_tokens=4, temperature=temperature))
        counts = Counter(c.token_ids[0] for c in completions)
        statistic = sum((counts[t] - n * p) ** 2 / (n * p) for t, p in zip((11, 12, 13), shares, strict=True))
        # The 99.9 % point of chi-square with two degrees of freedom.
        assert statistic < 13.8
        share = dict(zip((11, 12, 13), shares, strict=True))
        for c in completions:
            assert c.token_ids[1:] == [1]
            assert_close(c.logps, [math.log(share[c.token_ids[0]]), 0.0], rtol=0, atol=1e-5)

    @both_ways
    def test_of_whole_sequences(self, shared_prompts):
        torch.manual_seed(0)
        # Three fair coins in a row: eight sequences of the same probability.
        chain = {10: {11: 0.5, 12: 0.5}}
        chain |= {t: {13: 0.5, 14: 0.5} for t in (11, 12)} | {t: {15: 0.5, 16: 0.5} for t in (13, 14)}
        chain |= {t: {1: 1.0} for t in (15, 16)}
        engine = engine_for(table_model(chain, packed=True), shared_prompts=shared_prompts)
        n = 1000
        groups = complete(engine, [[10], [30, 31, 10]], Sampling(n=n, max_tokens=6))
        for completions in groups:
            counts = Counter(tuple(c.token_ids) for c in completions)
            statistic = sum((counts[s] - n / 8) ** 2 / (n / 8) for s in counts)
            assert len(counts) == 8
            # The 99.9 % point with seven degrees of freedom.
            assert statistic < 24.3
        # Two prompts do not get the same completions.
        assert [c.token_ids for c in groups[0]] != [c.token_ids for c in groups[1]]

    @both_ways
    def test_of_a_random_model(self, shared_prompts):
        torch.manual_seed(0)
        model = random_model(packed=True)
        engine = engine_for(model, shared_prompts=shared_prompts)
        p = model(input_ids=torch.tensor([[10, 11, 12]])).logits[0, -1].softmax(-1).double()
        n = 5000
        (completions,) = complete(engine, [[10, 11, 12]], Sampling(n=n, max_tokens=1))
        counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=64)
        statistic = ((counts - n * p) ** 2 / (n * p)).sum().item()
        # Mean 63, deviation sqrt(126): four deviations.
        assert statistic < 63 + 4 * math.sqrt(126)

    @both_ways
    @pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.5}])
    def test_of_what_truncation_leaves(self, shared_prompts, truncation):
        # Of 1/2, 1/4, 1/8, 1/8 the first two are left, with 2/3 and 1/3.
        torch.manual_seed(0)
        chain = {10: {11: 0.5, 12: 0.25, 13: 0.125, 14: 0.125}}
        engine = engine_for(table_model(chain, packed=True), shared_prompts=shared_prompts)
        # A hair inside the boundary, where float rounding decides.
        truncation = {k: {"top_p": 0.74, "min_p": 0.49}.get(k, v) for k, v in truncation.items()}
        (completions,) = complete(engine, [[10]], Sampling(n=2000, max_tokens=1, **truncation))
        counts = Counter(c.token_ids[0] for c in completions)
        assert set(counts) == {11, 12}
        assert abs(counts[11] / 2000 - 2 / 3) < 4 * math.sqrt(2 / 9 / 2000)
        for c in completions:
            assert_close(math.exp(c.logps[0]), 2 / 3 if c.token_ids[0] == 11 else 1 / 3, rtol=1e-5, atol=0)


class TestLogps:
    @both_ways
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_equal_those_of_the_forward_pass(self, shared_prompts, temperature):
        torch.manual_seed(0)
        model = random_model(packed=True)
        sampling = Sampling(n=3, max_tokens=9, temperature=temperature)
        groups = complete(engine_for(model, eos_ids=range(9), shared_prompts=shared_prompts), RAGGED, sampling)
        flat = [c for completions in groups for c in completions]
        batch = make_batch(RAGGED, [c.token_ids for c in flat], [i for i in range(4) for _ in range(3)])
        expected = token_logps(model, batch, temperature=temperature).logps
        got = torch.tensor([x for c in flat for x in c.logps])
        assert_close(got, expected, rtol=0, atol=2e-5)
        assert len({len(c.token_ids) for c in flat}) > 2

    def test_of_known_chains(self):
        torch.manual_seed(0)
        (completions,) = complete(engine_for(table_model(CHAIN_S, packed=True)), [[10]], Sampling(n=20, max_tokens=6))
        assert {tuple(c.token_ids) for c in completions} == {(11, 12, 1), (11, 13, 14, 15, 1)}
        for c in completions:
            assert_close(c.logps, chain_logp(CHAIN_S, [10], c.token_ids), rtol=0, atol=1e-5)

    @both_ways
    def test_of_a_distribution_with_penalty(self, shared_prompts):
        # Ids 11 and 12 with logits ln 1/2 < 0: the one already seen is multiplied by 2, so ln 1/4, shares 2/3 and 1/3.
        torch.manual_seed(0)
        engine = engine_for(table_model({10: {11: 0.5, 12: 0.5}}, packed=True), shared_prompts=shared_prompts)
        sampling = Sampling(n=50, max_tokens=1, repetition_penalty=2.0)
        seen, fresh = complete(engine, [[12, 10], [10]], sampling)
        assert {c.token_ids[0] for c in seen} == {c.token_ids[0] for c in fresh} == {11, 12}
        for c in seen:
            assert_close(math.exp(c.logps[0]), 2 / 3 if c.token_ids[0] == 11 else 1 / 3, rtol=1e-5, atol=0)
        for c in fresh:
            assert_close(math.exp(c.logps[0]), 0.5, rtol=1e-5, atol=0)

    @both_ways
    def test_penalty_counts_what_was_generated(self, shared_prompts):
        # 10 -> 11 -> 11 or 12: after the first 11 it is penalised, (1/2)^2 against 1/2.
        engine = engine_for(
            table_model({10: {11: 1.0}, 11: {11: 0.5, 12: 0.5}}, packed=True), shared_prompts=shared_prompts
        )
        torch.manual_seed(0)
        (completions,) = complete(engine, [[10]], Sampling(n=40, max_tokens=2, repetition_penalty=2.0))
        for c in completions:
            assert_close(math.exp(c.logps[1]), 1 / 3 if c.token_ids[1] == 11 else 2 / 3, rtol=1e-5, atol=0)


class TestEnds:
    @both_ways
    def test_every_end_of_sequence_id_counts(self, shared_prompts):
        torch.manual_seed(0)
        chain = {10: {11: 0.5, 12: 0.5}, 11: {2: 1.0}, 12: {13: 1.0}, 13: {1: 1.0}}
        engine = engine_for(table_model(chain, packed=True), eos_ids=[1, 2], shared_prompts=shared_prompts)
        (completions,) = complete(engine, [[10]], Sampling(n=20, max_tokens=6))
        assert {tuple(c.token_ids) for c in completions} == {(11, 2), (12, 13, 1)}
        assert {c.finish_reason for c in completions} == {"stop"}

    @both_ways
    def test_an_end_at_the_limit_is_an_end(self, shared_prompts):
        torch.manual_seed(0)
        engine = engine_for(table_model(CHAIN_T, packed=True), shared_prompts=shared_prompts)
        (completions,) = complete(engine, [[10]], Sampling(n=20, max_tokens=2))
        got = {tuple(c.token_ids): c.finish_reason for c in completions}
        assert got == {(11, 1): "stop", (12, 12): "length"}

    @both_ways
    def test_an_end_in_the_prompt_does_not_count(self, shared_prompts):
        engine = engine_for(table_model({10: {11: 1.0}, 11: {1: 1.0}}, packed=True), shared_prompts=shared_prompts)
        ((c,),) = complete(engine, [[1, 1, 10]], Sampling(max_tokens=5))
        assert c.token_ids == [11, 1]

    @both_ways
    def test_min_new_tokens(self, shared_prompts):
        torch.manual_seed(0)
        chain = {10: {1: 0.99, 10: 0.01}}
        engine = engine_for(table_model(chain, packed=True), shared_prompts=shared_prompts)
        (completions,) = complete(engine, [[10]], Sampling(n=8, max_tokens=5, extra={"min_new_tokens": 3}))
        for c in completions:
            assert c.token_ids[:3] == [10, 10, 10]
            assert_close(c.logps[:3], [0.0] * 3, rtol=0, atol=1e-5)
        assert any(c.token_ids[3] == 1 for c in completions)


class TestSharing:
    def test_a_prompt_is_computed_once_whatever_its_completions(self, forward_rows):
        model = table_model(CHAIN_T, packed=True)
        seen = forward_rows(model)
        torch.manual_seed(0)
        prompts = [[20, 21, 22, 10], [10], [20, 21, 22, 10]]
        groups = complete(engine_for(model), prompts, Sampling(n=4, max_tokens=6))
        # One row holds the two distinct prompts, five tokens; then a token for every completion that still runs.
        lengths = [len(c.token_ids) for g in groups for c in g]
        running = [sum(n > step for n in lengths) for step in range(1, 6)]
        assert seen == [(1, 5), *((1, n) for n in running)]
        assert 0 < running[-1] < 12

    def test_nothing_runs_when_all_rows_have_ended(self, forward_rows):
        model = table_model(CHAIN_S, packed=True)
        seen = forward_rows(model)
        torch.manual_seed(0)
        complete(engine_for(model), [[10]], Sampling(n=8, max_tokens=50))
        assert len(seen) == 5

    def test_groups_are_yielded_as_they_finish(self):
        # 10 -> eos at once; 11 -> 12 -> 12 ... without end.
        model = table_model({10: {1: 1.0}, 11: {12: 1.0}, 12: {12: 1.0}}, packed=True)
        prompts = [Prompt([11]), Prompt([10])]
        order = [index for index, _ in engine_for(model).generate(prompts, Sampling(n=2, max_tokens=5))]
        assert order == [1, 0]

    def test_completions_do_not_depend_on_who_leaves(self):
        # Rows that end at different steps leave the others' keys and values in place.
        torch.manual_seed(0)
        model = random_model(packed=True)
        sampling = Sampling(n=6, max_tokens=70)
        for completions, ids in zip(complete(engine_for(model, eos_ids=[7, 8]), RAGGED, sampling), RAGGED, strict=True):
            batch = make_batch([ids], [c.token_ids for c in completions], [0] * 6)
            got = torch.tensor([x for c in completions for x in c.logps])
            assert_close(got, token_logps(model, batch).logps, rtol=0, atol=5e-5)

    @pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
    def test_sliding_windows_pass_over_prompt_and_completion(self, family):
        torch.manual_seed(0)
        model = family_model(family, packed=True)
        groups = complete(engine_for(model), RAGGED, Sampling(n=2, max_tokens=14))
        batch = make_batch(RAGGED, [c.token_ids for g in groups for c in g], [i for i in range(4) for _ in range(2)])
        got = torch.tensor([x for g in groups for c in g for x in c.logps])
        assert_close(got, token_logps(model, batch, packed=False).logps, rtol=0, atol=5e-5)


class TestManners:
    @both_ways
    def test_each_prompt_gets_completions_of_its_own(self, shared_prompts):
        chain = {x: {x + 1: 1.0} for x in range(10, 60, 2)} | {x + 1: {1: 1.0} for x in range(10, 60, 2)}
        engine = engine_for(table_model(chain, packed=True), shared_prompts=shared_prompts)
        last = [10, 40, 10, 22, 40, 10]
        groups = complete(engine, [[30] * (i % 3) + [x] for i, x in enumerate(last)], Sampling(n=2, max_tokens=4))
        assert [[c.token_ids for c in g] for g in groups] == [[[x + 1, 1]] * 2 for x in last]

    @both_ways
    @pytest.mark.parametrize("training", [True, False])
    def test_the_mode_comes_back(self, shared_prompts, training):
        model = random_model(packed=True).train(training)
        engine = engine_for(model, shared_prompts=shared_prompts)
        complete(engine, RAGGED, Sampling(max_tokens=2))
        assert model.training is training

    @both_ways
    def test_a_consumer_that_stops_early_leaves_the_model_training(self, shared_prompts):
        model = random_model(packed=True).train()
        stream = engine_for(model, shared_prompts=shared_prompts).generate(
            [Prompt(ids) for ids in RAGGED], Sampling(max_tokens=2)
        )
        next(stream)
        assert not model.training
        stream.close()
        assert model.training

    @both_ways
    def test_an_error_in_the_model_leaves_it_training(self, shared_prompts):
        model = random_model(packed=True).train()
        with pytest.raises(IndexError):
            complete(engine_for(model, shared_prompts=shared_prompts), [[999]], Sampling(max_tokens=2))
        assert model.training
        assert model(input_ids=torch.tensor([[10]])).logits.shape == (1, 1, 64)

    @both_ways
    def test_consumers_may_compute_gradients(self, shared_prompts):
        engine = engine_for(random_model(packed=True), shared_prompts=shared_prompts)
        for _ in engine.generate([Prompt(ids) for ids in RAGGED], Sampling(max_tokens=2)):
            assert torch.is_grad_enabled()

    @both_ways
    def test_an_unknown_setting_is_refused(self, shared_prompts):
        engine = engine_for(random_model(packed=True), shared_prompts=shared_prompts)
        with pytest.raises(ConfigError, match="`num_beams`"):
            complete(engine, RAGGED, Sampling(extra={"num_beams": 2}))

    @both_ways
    def test_an_empty_prompt_is_named(self, shared_prompts):
        engine = engine_for(random_model(packed=True), shared_prompts=shared_prompts)
        with pytest.raises(GenerationError, match="Prompt 1 has no tokens"):
            complete(engine, [[10], []], Sampling())

    @both_ways
    def test_no_prompts_no_completions(self, shared_prompts):
        assert complete(engine_for(random_model(packed=True), shared_prompts=shared_prompts), [], Sampling()) == []

    @both_ways
    def test_completions_name_the_weights_that_wrote_them(self, shared_prompts):
        engine = engine_for(random_model(packed=True), shared_prompts=shared_prompts)
        assert complete(engine, [[10]], Sampling(max_tokens=1))[0][0].policy_version == 0
        engine.update_weights([], version=3)
        assert complete(engine, [[10]], Sampling(max_tokens=1))[0][0].policy_version == 3

    @both_ways
    def test_the_seed_decides(self, shared_prompts):
        engine = engine_for(random_model(packed=True), shared_prompts=shared_prompts)

        def run(seed):
            torch.manual_seed(seed)
            return complete(engine, RAGGED, Sampling(n=2, max_tokens=4))

        assert run(0) == run(0) != run(1)
