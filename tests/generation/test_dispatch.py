"""What processes tell each other around generation, and the engines that they share."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.fake_llm import Choice, FakeLLM, install
from fixtures.models import table_model
from fixtures.syncs import small_model

from trl.errors import GenerationError
from trl.generation.dispatch import EngineGroup, Processes, join_alone, leave_alone
from trl.generation.vllm_colocate import VLLMColocateEngine
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights


def engine_on(llm, model, group):
    """An awake engine of one process of a group."""
    engine = VLLMColocateEngine(llm, group=group, eos_ids=[1], dtype="float32")
    engine.update_weights(PolicyWeights(model), 1)
    return engine


def echoing(group=EngineGroup()):  # noqa: B008 - it cannot be changed
    """An engine whose completion of a prompt starts 20 after it."""
    answer = lambda prompt, params: [Choice([prompt[0] + 20, 1])] * params.get("n")  # noqa: E731
    return engine_on(FakeLLM(small_model(), answer), small_model(), group)


def uniform(group=EngineGroup()):  # noqa: B008
    """An engine whose tokens are 64 equally likely ones."""
    return engine_on(FakeLLM(table_model({})), table_model({}), group)


def prompts(*ids):
    return [Prompt([i]) for i in ids]


def asked(engine):
    """What the process's part of the engine was asked for: prompts, and how many completions."""
    return [[ids, params.fields["n"]] for ids, params in engine.llm.llm_engine.asked]


# ---- one process ----


def test_a_process_alone_shares_with_nobody():
    items = [3, 1, 2]
    every, first, seed = EngineGroup().share(items, 9)
    assert (every, first, seed) == ([3, 1, 2], 0, 9)
    assert every is not items
    assert EngineGroup().share((), 9) == ([], 0, 9)


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_of_one_process_needs_no_group(count):
    processes = Processes(SimpleNamespace(num_processes=count, process_index=0))
    assert EngineGroup.of(processes, 1) == EngineGroup(1, None)


# ---- a part of an engine, its group played ----


@dataclass(frozen=True)
class Second:
    """The second of two processes: the first asks for its own prompts, with its own seed."""

    items: list
    seed: int
    size: int = 2

    def share(self, items, seed):
        return [*self.items, *items], len(self.items), self.seed


@dataclass(frozen=True)
class Listening:
    """Keeps what a process tells its group."""

    told: list
    size: int = 1

    def share(self, items, seed):
        self.told.extend(items)
        return items, 0, seed


@pytest.fixture
def vllm(monkeypatch):
    install(monkeypatch)


@pytest.fixture
def others(vllm):
    """What the first process tells the second: three completions of two prompts, of at most nine tokens."""
    group = Listening([])
    list(echoing(group).generate(prompts(10, 11), Sampling(n=3, max_tokens=9)))
    return group.told


def test_a_part_runs_everything_and_keeps_its_own(others):
    engine = echoing(Second(others, seed=5))
    results = engine.generate(prompts(12, 13, 14), Sampling(n=2))
    index, completions = next(results)
    assert (index, [c.token_ids for c in completions]) == (2, [[34, 1]] * 2)
    # The first process steps as often, whatever happens to the results here.
    assert engine.llm.llm_engine.steps == 5
    assert {i: [c.token_ids[0] for c in group] for i, group in results} == {0: [32] * 2, 1: [33] * 2}
    assert asked(engine) == [[[10], 3], [[11], 3], [[12], 2], [[13], 2], [[14], 2]]
    limits = [params.fields["max_tokens"] for _, params in engine.llm.llm_engine.asked]
    assert limits == [9, 9, 63, 63, 63]


def test_a_part_that_is_left_early_has_done_its_share(others):
    engine = echoing(Second(others, seed=5))
    results = engine.generate(prompts(12), Sampling())
    next(results)
    results.close()
    assert engine.llm.llm_engine.steps == 3
    assert engine.llm.llm_engine.aborted == []


def test_a_part_without_prompts_takes_part(others):
    engine = echoing(Second(others, seed=5))
    assert list(engine.generate([], Sampling())) == []
    assert engine.llm.llm_engine.steps == 2


@pytest.mark.usefixtures("vllm")
def test_the_parts_draw_with_the_seed_of_the_first():
    def completions(group_seed, own_seed):
        torch.manual_seed(own_seed)
        results = uniform(Second([], group_seed)).generate(prompts(12), Sampling(max_tokens=8))
        return [c.token_ids for _, (c,) in results]

    assert completions(5, 0) == completions(5, 1)
    assert completions(5, 0) != completions(6, 0)


@pytest.mark.usefixtures("vllm")
def test_greedy_requests_of_a_group_keep_their_copies():
    engine = echoing(Second([], seed=5))
    ((_, completions),) = engine.generate(prompts(12), Sampling(n=3, temperature=0.0))
    assert [c.token_ids for c in completions] == [[32, 1]] * 3
    assert asked(engine) == [[[12], 1]]


# ---- groups of one ----


@pytest.fixture
def no_group():
    assert not dist.is_initialized(), "another test left its group of processes"
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group")
def test_a_process_in_no_group_joins_one_of_its_own(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert join_alone() is True
    assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
    total = torch.tensor([2.0])
    dist.all_reduce(total)
    assert total.item() == 2.0
    assert dict(os.environ) == before
    # A second engine of the process uses the same group, which stays until both are gone.
    assert join_alone() is True
    leave_alone()
    assert dist.is_initialized()
    leave_alone()
    assert not dist.is_initialized()
    leave_alone()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("no_group")
def test_a_group_that_was_there_stays(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    assert join_alone() is False
    leave_alone()
    assert dist.group.WORLD is group


# ---- several processes ----


def start(folder, world, rank):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__)), str(folder), str(world), str(rank)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Number of processes -> what each of them found."""
    found = {}

    def results(world):
        if world not in found:
            folder = tmp_path_factory.mktemp(f"world{world}")
            processes = [start(folder, world, rank) for rank in range(world)]
            outputs = [process.communicate(timeout=150)[0] for process in processes]
            assert [p.returncode for p in processes] == [0] * world, "\n".join(outputs)
            found[world] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
        return found[world]

    return results


world_sizes = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])


@world_sizes
def test_a_pair_shares_in_order(worlds, world):
    """Process r brings r + 1 items and the seed 100 + r."""
    for rank, found in enumerate(worlds(world)):
        head = rank - rank % 2
        every = [[r, i] for r in (head, head + 1) for i in range(r + 1)]
        assert found["pair"] == [every, 0 if rank == head else head + 1, 100 + head]


@world_sizes
def test_an_uneven_share_may_be_nothing(worlds, world):
    """Only odd processes bring an item."""
    for rank, found in enumerate(worlds(world)):
        odd = rank - rank % 2 + 1
        assert found["uneven"] == [[odd], 0, 100 + odd - 1]


@pytest.mark.slow
def test_all_four_share_in_order(worlds):
    every = [[r, i] for r in range(4) for i in range(r + 1)]
    assert [found["all"] for found in worlds(4)] == [[every, first, 100] for first in (0, 1, 3, 6)]


@world_sizes
def test_an_engine_answers_each_process_of_a_pair_with_its_own(worlds, world):
    """Process r asks for r + 1 completions of the prompts 10 r, 10 r + 1, …, of which it has r + 1."""
    for rank, found in enumerate(worlds(world)):
        head = rank - rank % 2
        everything = [[[10 * r + i], r + 1] for r in (head, head + 1) for i in range(r + 1)]
        assert found["asked"] == everything
        assert found["steps"] == len(everything)
        expected = {str(i): [[10 * rank + i + 20, 1]] * (rank + 1) for i in range(rank + 1)}
        assert found["completions"] == expected


@world_sizes
def test_the_processes_of_a_pair_draw_alike(worlds, world):
    """They all ask for the same prompt: the engine's parts must agree on what both of its requests draw."""
    drawn = [found["drawn"] for found in worlds(world)]
    for head in range(0, world, 2):
        assert drawn[head] == drawn[head + 1]
        assert drawn[head][0] != drawn[head][1]
    if world == 4:
        assert drawn[0] != drawn[2]


@world_sizes
def test_scores_are_asked_for_together(worlds, world):
    """Only odd processes have something to score: two tokens, each of probability 1 / 64."""
    for rank, found in enumerate(worlds(world)):
        expected = [[pytest.approx(-4.1588831, abs=1e-5)] * 2] if rank % 2 else []
        assert found["scores"] == expected


@world_sizes
def test_a_process_that_fails_takes_its_neighbour_along(worlds, world):
    """Nobody waits for what never comes."""
    for rank, found in enumerate(worlds(world)):
        own = "Prompt 0 has 1000 tokens, and vLLM's context is"
        told = f"Another process that shares the engine failed: {own}" if rank % 2 else own
        assert found["failure"].startswith(told)


def in_group(rank, world):
    """What one process finds."""
    processes = Processes(SimpleNamespace(num_processes=world, process_index=rank))
    pair = EngineGroup.of(processes, 2)
    items = [(rank, i) for i in range(rank + 1)]
    found = {"pair": pair.share(items, 100 + rank), "uneven": pair.share([rank] if rank % 2 else [], 100 + rank)}
    if world == 4:
        found["all"] = EngineGroup.of(processes, 4).share(items, 100 + rank)
    engine = echoing(pair)
    results = engine.generate(prompts(*(10 * rank + i for i in range(rank + 1))), Sampling(n=rank + 1))
    completions = {index: [c.token_ids for c in group] for index, group in results}
    found |= {"completions": completions, "asked": asked(engine), "steps": engine.llm.llm_engine.steps}
    seen = []
    engine = uniform(pair)
    sample = engine.llm.answer
    engine.llm.answer = lambda prompt, params: seen.extend(choices := sample(prompt, params)) or choices
    torch.manual_seed(rank)
    list(engine.generate(prompts(10), Sampling(max_tokens=8)))
    scores = engine.scorers[0].score([[10, 11, 12]] if rank % 2 else [])
    return found | {"drawn": [choice.token_ids for choice in seen], "scores": scores, "failure": failure_of(pair, rank)}


def failure_of(pair, rank):
    """What a process is told where the even ones have a prompt that does not fit the context."""
    try:
        list(echoing(pair).generate(prompts(10) if rank % 2 else [Prompt([10] * 1000)], Sampling()))
    except GenerationError as error:
        return str(error)
    return None


def main(folder, world, rank):
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        found = in_group(rank, world)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
