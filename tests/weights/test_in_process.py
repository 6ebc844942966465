"""Weights into an engine of this process: phases, versions, and never a second copy of the model."""

import weakref

import pytest
import torch
from fixtures.fake_llm import FakeLLM, ParallelLMHead
from fixtures.models import random_model
from fixtures.syncs import small_model
from torch import nn

from trl.errors import WeightSyncError
from trl.weights.in_process import InProcessSync
from trl.weights.source import PolicyWeights
from trl.weights.tied_heads import repack_tied_heads


class CastCounter(FakeLLM):
    """Notes at each tensor how many of those before it are still alive."""

    def load(self, weights):
        self.alive: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        seen: list[weakref.ref] = []
        for _, tensor in weights:
            self.alive.append(sum(ref() is not None for ref in seen))
            self.dtypes.add(tensor.dtype)
            seen.append(weakref.ref(tensor))
            del tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_engine_gets_every_tensor_in_its_own_dtype(dtype):
    model = small_model()
    llm = FakeLLM(small_model(seed=1).to(dtype))
    sync = InProcessSync(llm, dtype)
    report = sync.update(PolicyWeights(model), 4)
    for (name, found), expected in zip(llm.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected.to(dtype)), name
    assert llm.calls == ["load", "reset cache"]
    assert sync.version == 4
    # 3 * 5 + 5, 5, and 5 * 2 numbers.
    assert report.num_bytes == 35 * dtype.itemsize
    assert list(report.seconds) == ["update", "caches"]
    assert min(report.seconds.values()) >= 0.0
    assert not report.rejoined
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_tensors_are_cast_one_at_a_time():
    model = random_model()
    llm = CastCounter(model)
    InProcessSync(llm, torch.bfloat16).update(PolicyWeights(model), 1)
    assert llm.dtypes == {torch.bfloat16}
    assert llm.alive == [0] * len(list(model.parameters()))
    assert len(llm.alive) > 20


def test_nothing_is_cast_before_it_is_taken(monkeypatch):
    """The engine may free or pack what it has between two tensors."""
    model = small_model()
    casts: list[tuple[int, ...]] = []
    original = torch.Tensor.to

    def counted(self, *args, **kwargs):
        casts.append(tuple(self.shape))
        return original(self, *args, **kwargs)

    class OneByOne(FakeLLM):
        def load(self, weights):
            assert casts == []
            for number, _ in enumerate(weights):
                assert len(casts) == number + 1

    llm = OneByOne(model)
    monkeypatch.setattr(torch.Tensor, "to", counted)
    InProcessSync(llm, torch.bfloat16).update(PolicyWeights(model), 1)
    assert casts == [(5, 3), (5,), (5,), (2, 5)]


def test_a_head_tied_to_the_embedding_is_not_sent_twice():
    model = random_model(tie_word_embeddings=True)
    llm = FakeLLM(model)
    InProcessSync(llm, torch.float32).update(PolicyWeights(model), 1)
    assert torch.equal(llm.model.lm_head.weight, model.model.embed_tokens.weight)
    assert not llm.model.lm_head.weight.isnan().any()


def test_later_weights_replace_earlier_ones():
    model = small_model()
    llm = FakeLLM(model)
    sync = InProcessSync(llm, torch.float32)
    weights = PolicyWeights(model)
    sync.update(weights, 1)
    with torch.no_grad():
        model["last"].weight.add_(1.0)
    assert not torch.equal(llm.model["last"].weight, model["last"].weight)
    sync.update(weights, 2)
    assert torch.equal(llm.model["last"].weight, model["last"].weight)
    assert sync.version == 2


class Broken(FakeLLM):
    """Raises `error` in the middle of a load while it is `broken`."""

    broken = False
    error: Exception

    def load(self, weights):
        if self.broken:
            next(weights)
            raise self.error
        super().load(weights)


def test_memory_that_runs_out_is_left_for_the_trainer_to_explain():
    llm = Broken(small_model())
    sync = InProcessSync(llm, torch.float32)
    llm.broken, llm.error = True, torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        sync.update(PolicyWeights(small_model()), 1)
    assert sync.version is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no kernel"),
        ValueError("bad"),
        KeyError("first.weight"),
        AssertionError("shapes"),
        AttributeError("no loader"),
        TypeError("not a tensor"),
    ],
)
def test_a_failure_while_loading_leaves_no_version(error):
    llm = Broken(small_model())
    llm.error = error
    sync = InProcessSync(llm, torch.float32)
    sync.update(PolicyWeights(small_model()), 1)
    llm.broken = True
    with pytest.raises(WeightSyncError, match="did not reach vLLM in this process") as caught:
        sync.update(PolicyWeights(small_model()), 2)
    assert caught.value.phase == "update"
    assert not caught.value.repaired
    assert caught.value.__cause__ is error
    assert f"(phase update): {type(error).__name__}: {error}." in str(caught.value)
    assert sync.version is None
    assert llm.calls[-1] == "load"
    llm.broken = False
    sync.update(PolicyWeights(small_model()), 3)
    assert sync.version == 3


def test_a_failure_while_the_head_is_packed_leaves_no_version(monkeypatch):
    def broken(self, function):
        raise RuntimeError("no such product")

    monkeypatch.setattr(FakeLLM, "apply_model", broken)
    sync = InProcessSync(FakeLLM(small_model()), torch.float32)
    with pytest.raises(WeightSyncError, match="no such product") as caught:
        sync.update(PolicyWeights(small_model()), 1)
    assert caught.value.phase == "update"
    assert sync.version is None


def test_a_cache_that_stays_is_an_error():
    llm = FakeLLM(small_model())
    llm.caches_allowed = False
    sync = InProcessSync(llm, torch.float32)
    with pytest.raises(WeightSyncError, match="the prefix cache was not reset") as caught:
        sync.update(PolicyWeights(small_model()), 1)
    assert caught.value.phase == "caches"
    assert sync.version is None


def test_an_engine_without_a_cache_answers_nothing_and_that_is_fine(monkeypatch):
    llm = FakeLLM(small_model())
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda: None)
    sync = InProcessSync(llm, torch.float32)
    sync.update(PolicyWeights(small_model()), 1)
    assert sync.version == 1


def test_an_interruption_is_passed_on_and_leaves_no_version():
    class Interrupted(FakeLLM):
        def load(self, weights):
            raise KeyboardInterrupt

    sync = InProcessSync(Interrupted(small_model()), torch.float32)
    with pytest.raises(KeyboardInterrupt):
        sync.update(PolicyWeights(small_model()), 1)
    assert sync.version is None


def test_packed_copies_of_a_head_are_renewed_and_nothing_else():
    model = nn.ModuleDict({"packed": ParallelLMHead(True), "plain": ParallelLMHead(False), "other": nn.Linear(2, 2)})
    repack_tied_heads(model)
    assert [model["packed"].repacked, model["plain"].repacked] == [1, 0]


def test_every_update_renews_the_packed_copies():
    model = small_model()
    llm = FakeLLM(model)
    llm.model["head"] = ParallelLMHead(True)
    sync = InProcessSync(llm, torch.float32)
    for version in (1, 2):
        sync.update(PolicyWeights(model), version)
        assert llm.model["head"].repacked == version
