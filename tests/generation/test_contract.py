"""What every engine keeps to, whatever writes its completions."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fixtures.colocate import colocate_engine, with_heads_for_vllm
from fixtures.models import CHAIN_S, chain_logp, table_model
from fixtures.vllm_stub import running_stub

from trl._deps import available
from trl.generation.local import LocalEngine
from trl.generation.vllm_probe import probe
from trl.generation.vllm_server import Server, VLLMServerEngine
from trl.types import Completion, Engine, Prompt, Sampling
from trl.weights.source import PolicyWeights
from trl.weights.sync import ServerSync
from trl.weights.transfer import make_transfer


@contextmanager
def local(shared_prompts: bool) -> Iterator[Engine]:
    yield LocalEngine(table_model(CHAIN_S, packed=shared_prompts), eos_ids=[1], shared_prompts=shared_prompts)


@contextmanager
def server(version: str) -> Iterator[Engine]:
    """A server whose model is the same table, which it receives as weights."""
    with running_stub(version) as stub:
        client = stub.client()
        facts = probe(client)
        sync = ServerSync(client, facts, make_transfer(client, facts, torch.device("cpu"), None), deadline=5.0)
        engine = VLLMServerEngine([Server(client, facts, sync)])
        engine.update_weights(PolicyWeights(table_model(CHAIN_S)), 0)
        yield engine
        engine.close()


@contextmanager
def colocate() -> Iterator[Engine]:
    """A real vLLM in this process, whose model is the same table."""
    with colocate_engine(with_heads_for_vllm(table_model(CHAIN_S))) as engine:
        engine.update_weights(PolicyWeights(table_model(CHAIN_S)), 0)
        yield engine


# vLLM's own warnings are no failures.
WITH_VLLM = [
    pytest.mark.skipif(not available("vllm"), reason="needs a vLLM in this environment"),
    pytest.mark.filterwarnings("default"),
]
ENGINES = {
    "local": lambda: local(True),
    "local, model's own generate": lambda: local(False),
    "server 0.23": lambda: server("0.23"),
    "server 0.33": lambda: server("0.33"),
    "colocate": colocate,
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=WITH_VLLM if name == "colocate" else ()) for name in ENGINES]
)
def engine(request):
    with ENGINES[request.param]() as made:
        yield made


PROMPTS = [[10], [20, 21, 10], [13], [10], [12]]


def complete(engine: Engine, sampling: Sampling) -> list[list[Completion]]:
    pairs = list(engine.generate([Prompt(ids) for ids in PROMPTS], sampling))
    assert sorted(index for index, _ in pairs) == list(range(len(PROMPTS)))
    return [completions for _, completions in sorted(pairs, key=lambda p: p[0])]


@pytest.mark.parametrize("n", [1, 3])
def test_every_prompt_gets_n_completions_once(engine, n):
    assert [len(c) for c in complete(engine, Sampling(n=n, max_tokens=8))] == [n] * len(PROMPTS)


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
def test_lengths_and_reasons(engine, max_tokens):
    for completions in complete(engine, Sampling(n=2, max_tokens=max_tokens)):
        for c in completions:
            assert 1 <= len(c.token_ids) <= max_tokens
            assert c.finish_reason == ("stop" if c.token_ids[-1] == 1 else "length")
            assert c.finish_reason == "stop" or len(c.token_ids) == max_tokens
            assert 1 not in c.token_ids[:-1]
            assert len(c.logps) == len(c.token_ids)


def test_completions_continue_their_own_prompt_with_the_probabilities_of_the_model(engine):
    for prompt, completions in zip(PROMPTS, complete(engine, Sampling(n=4, max_tokens=8)), strict=True):
        for c in completions:
            assert c.logps == pytest.approx(chain_logp(CHAIN_S, prompt, c.token_ids), abs=1e-4)


def test_greedy_completions_of_a_prompt_are_equal(engine):
    for completions in complete(engine, Sampling(n=3, max_tokens=8, temperature=0.0)):
        assert len({tuple(c.token_ids) for c in completions}) == 1


def test_a_prompt_that_comes_twice_is_sampled_twice(engine):
    """Half of the chains go one way: twice 24 equal draws have a chance of 2 in 100 million."""
    completions = complete(engine, Sampling(n=24, max_tokens=8))
    assert [c.token_ids for c in completions[0]] != [c.token_ids for c in completions[3]]


def test_the_version_of_the_weights_travels_along(engine):
    weights = PolicyWeights(table_model(CHAIN_S))
    for version in (5, 6):
        engine.update_weights(weights, version)
        assert {c.policy_version for row in complete(engine, Sampling(n=2, max_tokens=4)) for c in row} == {version}


def test_nothing_asked_for_is_nothing_done(engine):
    assert list(engine.generate([], Sampling())) == []


def test_it_says_whether_its_weights_are_its_own(engine):
    assert engine.own_weights is not isinstance(engine, LocalEngine)
