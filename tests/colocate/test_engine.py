"""The engine in the trainer's process writes what the policy itself would write."""

import pytest
import torch
from fixtures.colocate import MAX_MODEL_LEN, PROMPTS, colocate_engine, complete, skip_without_vllm
from fixtures.models import vllm_model
from fixtures.tokenizers import word_tokenizer

from trl.errors import ConfigError, GenerationError
from trl.generation.local import LocalEngine
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights

skip_without_vllm()
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own

GREEDY = Sampling(n=2, max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def policy():
    return vllm_model()


@pytest.fixture(scope="module")
def shared_engine(policy):
    with colocate_engine(policy) as made:
        yield made


@pytest.fixture
def engine(shared_engine, policy):
    shared_engine.update_weights(PolicyWeights(policy), 0)
    return shared_engine


def drawn(engine, max_tokens=12, n=4, prompts=PROMPTS, **extra):
    """All completions of all prompts, drawn with these `generation_kwargs`."""
    sampling = Sampling(n=n, max_tokens=max_tokens, extra=extra)
    return [c for row in complete(engine, sampling, prompts) for c in row]


# ---- weights ----


def assert_follows(engine, policy):
    """Greedy completions and their log-probs are the policy's, through two updates."""
    local = LocalEngine(policy, eos_ids=[1])
    seen = []
    for version in range(3):
        if version:
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.dim() > 1:
                        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(version)))
        engine.update_weights(PolicyWeights(policy), version)
        told = complete(engine, GREEDY)
        for row, expected in zip(told, complete(local, GREEDY), strict=True):
            assert [c.token_ids for c in row] == [c.token_ids for c in expected]
            assert [c.finish_reason for c in row] == [c.finish_reason for c in expected]
            for one, other in zip(row, expected, strict=True):
                assert one.logps == pytest.approx(other.logps, abs=1e-4)
                assert one.policy_version == version
        seen.append([c.token_ids for row in told for c in row])
    # The updates were large enough to see: old weights would have been found out.
    assert seen[0] != seen[1] != seen[2] != seen[0]


def assert_scores_are_the_policys(engine, policy):
    (scorer,) = engine.scorers
    for prompt, row in zip(PROMPTS, complete(engine, Sampling(n=4, max_tokens=12)), strict=True):
        sequences = [[*prompt.token_ids, *c.token_ids] for c in row]
        for c, ids, told in zip(row, sequences, scorer.score(sequences), strict=True):
            with torch.no_grad():
                logps = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            own = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            assert c.logps == pytest.approx(own[len(prompt.token_ids) - 1 :], abs=1e-4)
            assert told == pytest.approx(own, abs=1e-4)


# The engines of these two end before that of all others begins.


def test_a_head_that_is_tied_to_the_embedding_follows_too():
    policy = vllm_model(tied=True)
    with colocate_engine(policy) as engine:
        with pytest.raises(GenerationError, match="update_weights"):
            complete(engine, GREEDY)
        assert_follows(engine, policy)
        assert_scores_are_the_policys(engine, policy)


def test_an_engine_that_sleeps_does_not_generate_until_it_gets_weights(policy):
    with colocate_engine(policy, vllm_enable_sleep_mode=True) as engine:
        assert engine.sleep()
        for _ in range(2):
            with pytest.raises(GenerationError, match="sleeps"):
                complete(engine, GREEDY)
            engine.update_weights(PolicyWeights(policy), 1)
            expected = complete(LocalEngine(policy, eos_ids=[1]), GREEDY)
            told = complete(engine, GREEDY)
            assert [c.token_ids for row in told for c in row] == [c.token_ids for row in expected for c in row]
            assert engine.sleep()


def test_greedy_completions_are_the_policys_own_before_and_after_updates(shared_engine):
    assert_follows(shared_engine, vllm_model())


def test_drawn_completions_and_scores_have_the_policys_logps(engine, policy):
    assert_scores_are_the_policys(engine, policy)


def test_one_that_does_not_sleep_says_so(engine):
    assert not engine.sleep()
    assert len(complete(engine, GREEDY)) == len(PROMPTS)


# ---- randomness ----


def test_draws_follow_the_seed_of_the_process_and_leave_it_alone(engine):
    def run(seed, requests=1):
        torch.manual_seed(seed)
        told = [[c.token_ids for c in drawn(engine)] for _ in range(requests)]
        return told, torch.rand(()).item()

    first, after = run(3)
    again, after_again = run(3)
    other, _ = run(4)
    assert first == again
    assert after == after_again
    assert first != other
    both, _ = run(3, requests=2)
    assert both[0] == first[0]
    assert both[1] != both[0]


def test_what_the_caller_does_with_randomness_between_results_does_not_matter(engine):
    def run(meddle):
        torch.manual_seed(3)
        told = {}
        for index, row in engine.generate(PROMPTS, Sampling(n=2, max_tokens=12)):
            told[index] = [c.token_ids for c in row]
            if meddle:
                torch.manual_seed(0)
                torch.rand(5)
        return told

    assert run(False) == run(True)


# ---- generation_kwargs ----


def test_stop_strings_end_a_completion(engine):
    free = drawn(engine, n=16)
    word = next(t for t in sorted({t for c in free for t in c.token_ids[:-1]}) if t > 6)
    stopped = drawn(engine, n=16, stop=[f"w{word}"])
    assert any(c.token_ids[-1] == word for c in stopped)
    tokenizer = word_tokenizer()
    for c in stopped:
        # `w7` is also where `w70` would begin.
        ends = f"w{word}" in tokenizer.decode(c.token_ids, skip_special_tokens=True)
        assert f"w{word}" not in tokenizer.decode(c.token_ids[:-1], skip_special_tokens=True)
        assert (c.finish_reason == "stop") is (ends or c.token_ids[-1] == 1)
        assert len(c.logps) == len(c.token_ids)


def test_min_tokens_holds_back_the_end(engine):
    eager = drawn(engine, n=16, logit_bias={1: 20.0})
    assert {len(c.token_ids) for c in eager} == {1}
    late = drawn(engine, n=16, logit_bias={1: 20.0}, min_tokens=5)
    assert {len(c.token_ids) for c in late} == {6}
    assert all(c.token_ids[-1] == 1 and 1 not in c.token_ids[:-1] for c in late)


def test_min_new_tokens_is_the_same_setting(engine):
    late = drawn(engine, n=4, logit_bias={1: 20.0}, min_new_tokens=5)
    assert {len(c.token_ids) for c in late} == {6}


def test_ignore_eos_goes_on_to_the_limit(engine):
    on = drawn(engine, n=4, logit_bias={1: 5.0}, ignore_eos=True)
    assert {len(c.token_ids) for c in on} == {12}
    assert {c.finish_reason for c in on} == {"length"}
    assert any(1 in c.token_ids[:-1] for c in on)


@pytest.mark.parametrize("key", [17, "17"])
def test_logit_bias_makes_a_token_certain(engine, key):
    """Names of JSON and YAML settings are strings."""
    for c in drawn(engine, logit_bias={key: 90.0}):
        assert c.token_ids == [17] * 12
        # The log-probs are those after the bias: what was sampled from.
        assert c.logps == pytest.approx([0.0] * 12, abs=1e-4)


def test_bad_words_do_not_come(engine):
    free = [t for c in drawn(engine, n=16) for t in c.token_ids]
    word = max({t for t in free if t > 6}, key=free.count)
    assert word not in [t for c in drawn(engine, n=16, bad_words=[f"w{word}"]) for t in c.token_ids]


def test_allowed_token_ids_are_the_only_ones(engine):
    assert {t for c in drawn(engine, allowed_token_ids=[20, 21]) for t in c.token_ids} == {20, 21}


def test_further_stop_token_ids(engine):
    for c in drawn(engine, stop_token_ids=[17], logit_bias={17: 90.0}):
        assert (c.token_ids, c.finish_reason) == ([17], "stop")


def test_without_do_sample_it_is_greedy(engine):
    greedy = complete(engine, GREEDY)
    told = complete(engine, Sampling(n=2, max_tokens=12, extra={"do_sample": False}))
    assert [c.token_ids for row in told for c in row] == [c.token_ids for row in greedy for c in row]


def test_no_logps_where_nobody_asks(engine):
    for row in complete(engine, Sampling(n=2, max_tokens=4, with_logps=False)):
        assert [c.logps for c in row] == [[], []]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"beam_width": 3}, "beam_width"),
        ({"priority": 1}, "priority"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"top_p": 2.0}, "top_p"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"logit_bias": {99: 1.0}}, "logit_bias|99"),
        ({"stop": "w17", "detokenize": False}, "detokenize"),
    ],
)
def test_settings_that_it_does_not_take(engine, extra, named):
    with pytest.raises(ConfigError, match=named):
        drawn(engine, **extra)
    # Nothing is left in flight.
    assert len(complete(engine, GREEDY)) == len(PROMPTS)
    assert not engine.llm.llm_engine.has_unfinished_requests()


# ---- the context's length ----


def test_a_prompt_that_leaves_no_room_names_the_option(engine):
    with pytest.raises(GenerationError, match=r"Prompt 1 has 64 tokens.*`vllm_max_model_length`"):
        complete(engine, GREEDY, [Prompt([10]), Prompt([10] * MAX_MODEL_LEN)])
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_a_prompt_that_leaves_little_room_gets_what_there_is(engine):
    (c, *_) = drawn(engine, max_tokens=12, prompts=[Prompt([10] * (MAX_MODEL_LEN - 3))], ignore_eos=True)
    assert (len(c.token_ids), c.finish_reason) == (3, "length")


def test_little_room_is_no_mistake_of_min_tokens(engine):
    (c, *_) = drawn(engine, prompts=[Prompt([10] * (MAX_MODEL_LEN - 3))], min_tokens=5)
    assert len(c.token_ids) == 3


# ---- generators that nobody finishes ----


def start(engine):
    """A generator after its first result, with further requests still running."""
    lengths = [Prompt([10]), Prompt([20] * (MAX_MODEL_LEN - 2))]
    results = engine.generate(lengths, Sampling(n=2, max_tokens=40, extra={"ignore_eos": True}))
    index, _ = next(results)
    assert index == 1
    assert engine.llm.llm_engine.has_unfinished_requests()
    return results


def test_an_abandoned_generator_leaves_nothing_in_flight(engine, policy):
    start(engine).close()
    assert not engine.llm.llm_engine.has_unfinished_requests()
    engine.update_weights(PolicyWeights(policy), 1)
    expected = complete(LocalEngine(policy, eos_ids=[1]), GREEDY)
    told = complete(engine, GREEDY)
    assert [c.token_ids for row in told for c in row] == [c.token_ids for row in expected for c in row]


def test_a_generator_that_waits_does_not_disturb_the_next_one(engine, policy):
    """Somebody may still hold it, e.g. the traceback of an error. Its requests end while the next ones run."""
    waiting = start(engine)
    longer = Sampling(n=2, max_tokens=55, temperature=0.0, extra={"ignore_eos": True})
    short = [Prompt([30]), Prompt([31])]
    expected = complete(LocalEngine(policy, eos_ids=[]), Sampling(n=2, max_tokens=55, temperature=0.0), short)
    told = complete(engine, longer, short)
    assert [c.token_ids for row in told for c in row] == [c.token_ids for row in expected for c in row]
    waiting.close()
    assert not engine.llm.llm_engine.has_unfinished_requests()


# ---- more than one engine ----


def test_an_engine_outlives_another_one(engine, policy):
    expected = [c.token_ids for row in complete(engine, GREEDY) for c in row]
    with colocate_engine(policy) as other:
        other.update_weights(PolicyWeights(policy), 1)
        assert [c.token_ids for row in complete(other, GREEDY) for c in row] == expected
        assert [c.token_ids for row in complete(engine, GREEDY) for c in row] == expected
    assert [c.token_ids for row in complete(engine, GREEDY) for c in row] == expected
