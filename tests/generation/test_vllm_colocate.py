"""The engine inside the trainer's process, against a stand-in for `vllm.LLM`."""

import gc
import math

import pytest
import torch
from fixtures.fake_llm import GENERATION, Choice, FakeLLM, FlatLogprobs, install, scripted
from fixtures.models import random_model, table_model
from fixtures.syncs import small_model

from trl.errors import ConfigError, GenerationError, WeightSyncError
from trl.generation.dispatch import EngineGroup
from trl.generation.vllm_colocate import VLLMColocateEngine
from trl.types import Completion, Prompt, Sampling
from trl.weights.source import PolicyWeights

CHAIN = {10: {11: 0.75, 12: 0.25}, 11: {1: 1.0}, 12: {1: 1.0}}


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    return install(monkeypatch)


def asleep(llm, **options):
    """An engine that has no weights yet."""
    options = {"group": EngineGroup(), "eos_ids": [2, 1], "dtype": "float32", **options}
    return VLLMColocateEngine(llm, **options)


def awake(llm, model, version=3, **options):
    engine = asleep(llm, **options)
    engine.update_weights(PolicyWeights(model), version)
    return engine


def answering(answer, **options):
    """An engine whose completions come from the answer, and its LLM."""
    llm = FakeLLM(small_model(), answer)
    return awake(llm, small_model(), **options), llm


def fields_of(llm):
    """The parameters of the last request."""
    return llm.llm_engine.asked[-1][1].fields


def prompts(*ids):
    return [Prompt(list(i)) for i in ids]


# ---- results ----


def test_results_come_as_they_finish():
    engine, llm = answering(lambda prompt, params: [Choice([prompt[0] + 20, 1])])
    results = engine.generate(prompts([10], [11], [12]), Sampling())
    index, (completion,) = next(results)
    assert (index, completion.token_ids) == (2, [32, 1])
    assert llm.llm_engine.steps == 1
    assert [(i, c.token_ids) for i, (c,) in results] == [(1, [31, 1]), (0, [30, 1])]
    assert llm.llm_engine.steps == 3
    assert llm.llm_engine.aborted == []


def test_every_prompt_has_n_completions():
    engine, llm = answering(scripted([20, 1], [21], [22, 23]))
    results = dict(engine.generate(prompts([10], [11, 12]), Sampling(n=3)))
    assert {i: [c.token_ids for c in completions] for i, completions in results.items()} == {
        i: [[20, 1], [21], [22, 23]] for i in (0, 1)
    }
    assert [(ids, params.fields["n"]) for ids, params in llm.llm_engine.asked] == [([10], 3), ([11, 12], 3)]


def test_no_prompts_are_no_completions():
    engine, llm = answering(scripted([20, 1]))
    assert list(engine.generate([], Sampling())) == []
    assert llm.llm_engine.steps == 0


@pytest.mark.parametrize("sampling", [Sampling(n=4, temperature=0.0), Sampling(n=4, extra={"do_sample": False})])
def test_greedy_completions_are_written_once(sampling):
    engine, llm = answering(scripted([20, 1], [21, 1]))
    ((_, completions),) = engine.generate(prompts([10]), sampling)
    assert [c.token_ids for c in completions] == [[20, 1]] * 4
    assert (fields_of(llm)["n"], fields_of(llm)["temperature"]) == (1, 0.0)


def test_reasons_and_versions():
    choices = [Choice([20, 1], "stop"), Choice([21, 22], "length")]
    engine, _ = answering(lambda prompt, params: choices)
    ((_, completions),) = engine.generate(prompts([10]), Sampling(n=2, with_logps=False))
    assert completions == [Completion([20, 1], [], "stop", 3), Completion([21, 22], [], "length", 3)]


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_any_other_reason_is_an_error(reason):
    engine, llm = answering(lambda prompt, params: [Choice([20], reason)])
    with pytest.raises(GenerationError, match=f"ended a completion with {reason!r}"):
        list(engine.generate(prompts([10], [11]), Sampling()))
    assert llm.llm_engine.pending == {}


def test_token_ids_are_lists_of_their_own():
    ids = (20, 1)
    engine, _ = answering(lambda prompt, params: [Choice(ids)])
    ((_, (completion,)),) = engine.generate(prompts([10]), Sampling())
    assert completion.token_ids == [20, 1]
    assert type(completion.token_ids) is list


# ---- log-probs ----


def test_logps_are_those_of_the_drawn_tokens():
    """The drawn token comes first at its position, whatever else is told there."""
    flat = FlatLogprobs([-0.5, -0.1, -0.7, -2.0, -3.0], start_indices=[0, 2, 4])
    engine, llm = answering(lambda prompt, params: [Choice([20, 21, 1], logprobs=flat)])
    ((_, (completion,)),) = engine.generate(prompts([10]), Sampling())
    assert completion.logps == [-0.5, -0.7, -3.0]
    assert fields_of(llm)["logprobs"] == 0
    assert fields_of(llm)["flat_logprobs"] is True


def test_logps_that_nobody_asks_for_are_not_made():
    engine, llm = answering(scripted([20, 1]))
    ((_, (completion,)),) = engine.generate(prompts([10]), Sampling(with_logps=False))
    assert completion.logps == []
    assert "logprobs" not in fields_of(llm)
    assert fields_of(llm)["flat_logprobs"] is False


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.75), (0.5, 0.9)])
def test_completions_and_logps_of_a_known_model(temperature, share):
    engine = awake(FakeLLM(table_model(CHAIN)), table_model(CHAIN))
    torch.manual_seed(0)
    ((_, completions),) = engine.generate(prompts([20, 10]), Sampling(n=64, temperature=temperature, max_tokens=5))
    for completion in completions:
        first = share if completion.token_ids == [11, 1] else 1 - share
        assert completion.token_ids in ([11, 1], [12, 1])
        assert completion.logps == pytest.approx([math.log(first), 0.0], abs=1e-5)
        assert completion.finish_reason == "stop"
    assert 30 < sum(c.token_ids[0] == 11 for c in completions) < 64


# ---- what a request says ----


def test_a_request_says_everything_of_the_sampling():
    engine, llm = answering(scripted([20, 1]))
    sampling = Sampling(
        n=2, max_tokens=7, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
        extra={"min_new_tokens": 2, "bad_words": ["no"]},
    )  # fmt: skip
    list(engine.generate(prompts([10]), sampling))
    assert fields_of(llm) == {
        "n": 2, "max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0, "min_tokens": 2, "bad_words": ["no"],
        "stop_token_ids": [1, 2], "detokenize": False, "output_kind": "final only", "flat_logprobs": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "stops"),
    [
        ({}, [1, 2]),
        ({"stop_token_ids": [30, 2]}, [1, 2, 30]),
        ({"stop_token_ids": None}, [1, 2]),
        ({"ignore_eos": False, "stop_token_ids": []}, [1, 2]),
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "stop_token_ids": [30]}, [30]),
    ],
)
def test_every_end_of_sequence_id_stops_unless_it_is_to_be_ignored(extra, stops):
    engine, llm = answering(scripted([20, 1]))
    list(engine.generate(prompts([10]), Sampling(extra=extra)))
    assert fields_of(llm).get("stop_token_ids") == stops
    assert fields_of(llm).get("ignore_eos") == extra.get("ignore_eos")


@pytest.mark.parametrize(
    ("extra", "text"),
    [({}, False), ({"stop_strings": ["w20"]}, True), ({"stop": "w20"}, True), ({"stop": []}, False)],
)
def test_text_is_made_only_where_stop_strings_are_looked_for(extra, text):
    engine, llm = answering(scripted([20, 1]))
    list(engine.generate(prompts([10]), Sampling(extra=extra)))
    assert fields_of(llm)["detokenize"] is text
    assert fields_of(llm).get("stop") == (extra.get("stop_strings") or extra.get("stop"))


def test_structured_outputs_are_an_object_of_vllm():
    engine, llm = answering(scripted([20, 1]), structured_outputs={"regex": "w2."})
    list(engine.generate(prompts([10], [11]), Sampling()))
    assert [params.fields["structured_outputs"].regex for _, params in llm.llm_engine.asked] == ["w2."] * 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"priority": 1}, "has `priority`, which only a vLLM server takes"),
        ({"vllm_xargs": {}, "truncate_prompt_tokens": 3}, "has `truncate_prompt_tokens`, `vllm_xargs`, which only"),
        ({"num_beams": 3}, "has `num_beams`, which a request to vLLM cannot carry"),
        ({"n": 3}, "has `n`, which a request to vLLM cannot carry"),
        ({"logprobs": 3}, "has `logprobs`, which a request to vLLM cannot carry"),
    ],
)
def test_what_the_engine_does_not_take_is_named(extra, message):
    engine, llm = answering(scripted([20, 1]))
    with pytest.raises(ConfigError, match=message):
        list(engine.generate(prompts([10]), Sampling(extra=extra)))
    assert llm.llm_engine.asked == []


# ---- room ----


def test_a_completion_gets_the_room_that_the_prompt_leaves():
    engine, llm = answering(scripted([20, 1]))
    list(engine.generate(prompts([10] * 3, [10] * 60, [10] * 63), Sampling(max_tokens=5)))
    assert [params.fields["max_tokens"] for _, params in llm.llm_engine.asked] == [5, 4, 1]


def test_a_prompt_without_room_is_named_before_anything_is_asked_for():
    engine, llm = answering(scripted([20, 1]))
    with pytest.raises(GenerationError) as caught:
        list(engine.generate(prompts([10], [11] * 64), Sampling(max_tokens=5)))
    assert str(caught.value) == (
        "Prompt 1 has 64 tokens, and vLLM's context is 64: set a larger `vllm_max_model_length`, or drop the row."
    )
    assert llm.llm_engine.asked == []


# ---- an end before the end ----


def test_results_that_nobody_waits_for_are_aborted():
    engine, llm = answering(scripted([20, 1]))
    results = engine.generate(prompts([10], [11], [12]), Sampling())
    next(results)
    results.close()
    assert sorted(llm.llm_engine.aborted) == ["0", "1"]
    assert llm.llm_engine.pending == {}
    assert len(list(engine.generate(prompts([10]), Sampling()))) == 1


def test_a_step_that_fails_leaves_nothing_behind():
    def broken(prompt, params):
        raise RuntimeError("engine died")

    engine, llm = answering(broken)
    with pytest.raises(RuntimeError, match="engine died"):
        list(engine.generate(prompts([10], [11]), Sampling()))
    assert llm.llm_engine.pending == {}


# ---- randomness ----


@pytest.fixture
def sampler():
    """An engine that draws each of its tokens from 64 equally likely ones."""
    return awake(FakeLLM(table_model({})), table_model({}))


def drawn(engine, between=lambda: None):
    """Completions of three prompts, by prompt, with something happening after each result."""
    found = {}
    for index, completions in engine.generate(prompts([10], [11], [12]), Sampling(n=2, max_tokens=8)):
        found[index] = [c.token_ids for c in completions]
        between()
    return found


def test_the_generator_of_torch_decides_the_draws(sampler):
    torch.manual_seed(7)
    first, second = drawn(sampler), drawn(sampler)
    torch.manual_seed(7)
    assert [drawn(sampler), drawn(sampler)] == [first, second]
    assert first != second
    assert len({tuple(ids) for group in first.values() for ids in group}) == 6
    torch.manual_seed(8)
    assert drawn(sampler) != first


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_generation_takes_one_number_of_the_generator(sampler, count):
    torch.manual_seed(7)
    torch.randint(2**31 - 1, ())
    expected = torch.rand(3)
    torch.manual_seed(7)
    list(sampler.generate(prompts(*[[10]] * count), Sampling(max_tokens=8)))
    assert torch.equal(torch.rand(3), expected)


def test_draws_between_results_change_nothing_and_are_not_changed(sampler):
    torch.manual_seed(7)
    undisturbed = drawn(sampler)
    torch.manual_seed(7)
    torch.randint(2**31 - 1, ())
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    found = []
    assert drawn(sampler, lambda: found.append(torch.rand(()).item())) == undisturbed
    assert found == expected


def test_a_seed_set_between_results_changes_nothing_and_stays(sampler):
    torch.manual_seed(7)
    undisturbed = drawn(sampler)
    torch.manual_seed(7)
    assert drawn(sampler, lambda: torch.manual_seed(0)) == undisturbed
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


def test_a_step_that_fails_gives_the_generator_back():
    def broken(prompt, params):
        torch.rand(5)
        raise RuntimeError("engine died")

    engine, _ = answering(broken)
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="engine died"):
        list(engine.generate(prompts([10]), Sampling()))
    after = torch.rand(3)
    torch.manual_seed(7)
    torch.randint(2**31 - 1, ())
    assert torch.equal(after, torch.rand(3))


# ---- weights and sleep ----


def test_there_is_nothing_to_generate_with_before_weights_come():
    engine = asleep(FakeLLM(small_model(), scripted([20, 1])))
    with pytest.raises(GenerationError, match=r"no weights \(none were sent, or not all\): call `update_weights`"):
        next(engine.generate(prompts([10]), Sampling()))


def test_nor_while_it_sleeps():
    engine, llm = answering(scripted([20, 1]), sleeps=True)
    assert engine.sleep() is True
    with pytest.raises(GenerationError, match=r"no weights \(it sleeps\): call `update_weights`"):
        next(engine.generate(prompts([10]), Sampling()))
    assert llm.calls == ["sleep", *GENERATION[:4], "sleep"]
    assert engine._sync.version is None


def test_the_order_of_a_generation():
    engine, llm = answering(scripted([20, 1]), sleeps=True)
    for version in (1, 2):
        engine.update_weights(PolicyWeights(small_model()), version)
        ((_, (completion,)),) = engine.generate(prompts([10]), Sampling())
        assert completion.policy_version == engine.policy_version == version
        assert engine.sleep() is True
        assert engine.sleep() is True
    # `answering` has sent weights already.
    once = [call for call in GENERATION if not call.startswith("wake")]
    assert llm.calls == ["sleep", *GENERATION[:4], *once, *GENERATION]


def test_an_engine_that_does_not_sleep_keeps_its_weights():
    engine, llm = answering(scripted([20, 1]))
    assert engine.sleep() is False
    assert len(list(engine.generate(prompts([10]), Sampling()))) == 1
    assert llm.calls == ["load", "reset cache", "generate"]


def test_weights_go_in_before_the_cache_has_memory():
    """That of the cache is what the gathered tensors live in meanwhile."""

    class Watched(FakeLLM):
        def load(self, weights):
            self.at_load = set(self.memory)
            super().load(weights)

    llm = Watched(small_model())
    awake(llm, small_model(), sleeps=True)
    assert llm.at_load == {"weights"}
    assert llm.memory == {"weights", "kv_cache"}


def test_the_update_is_reported():
    engine, _ = answering(scripted([20, 1]))
    assert engine.last_sync.num_bytes == 35 * 4
    assert set(engine.last_sync.seconds) == {"update", "caches"}


@pytest.mark.parametrize("sleeps", [True, False])
def test_half_an_update_is_no_weights(sleeps):
    class Broken(FakeLLM):
        broken = False

        def load(self, weights):
            if self.broken:
                raise RuntimeError("link down")
            super().load(weights)

    llm = Broken(small_model(), scripted([20, 1]))
    engine = awake(llm, small_model(), sleeps=sleeps)
    engine.sleep()
    llm.broken = True
    with pytest.raises(WeightSyncError, match="link down") as caught:
        engine.update_weights(PolicyWeights(small_model()), 5)
    assert caught.value.phase == "update"
    assert engine.policy_version == 3
    with pytest.raises(GenerationError, match="has no weights"):
        next(engine.generate(prompts([10]), Sampling()))


def test_closing_ends_the_engine_and_what_came_with_it():
    closed = []
    engine, _ = answering(
        scripted([20, 1]), on_close=[lambda: closed.append("engine"), lambda: closed.append("groups")]
    )
    engine.close()
    assert closed == ["engine", "groups"]
    engine.close()
    assert closed == ["engine", "groups"]


def test_an_engine_that_nobody_closes_ends_with_its_owner():
    closed = []
    engine, _ = answering(scripted([20, 1]), on_close=[lambda: closed.append("engine")])
    del engine
    gc.collect()
    assert closed == ["engine"]


# ---- scores ----


def test_it_scores_tokens_with_its_weights():
    model = random_model()
    engine = awake(FakeLLM(random_model(seed=1)), model)
    (scorer,) = engine.scorers
    assert (scorer.name, scorer.dtype, scorer.max_model_len) == ("vLLM in this process", "float32", 64)
    sequences = [[10, 11, 12, 1], [20, 21]]
    told = scorer.score(sequences)
    for ids, logps in zip(sequences, told, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert logps == pytest.approx([expected[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-5)


def test_nothing_to_score_is_no_score():
    engine, _ = answering(scripted([20, 1]))
    assert engine.scorers[0].score([]) == []


def test_scores_need_weights_too():
    (scorer,) = asleep(FakeLLM(random_model())).scorers
    with pytest.raises(GenerationError, match="has no weights"):
        scorer.score([[10, 11]])


def test_scoring_leaves_the_generator_alone():
    """Which steps are compared must not decide what is drawn: a run that goes on compares at others."""
    engine = awake(FakeLLM(random_model()), random_model())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    engine.scorers[0].score([[10, 11, 12]])
    assert torch.equal(torch.rand(3), expected)
