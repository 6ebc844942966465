"""What is said about an engine's weights before training."""

import logging
from types import SimpleNamespace

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import random_model

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import ServerFacts
from trl.generation.vllm_server import Server, VLLMServerEngine
from trl.trainer.engine_weights import EngineWeights, report_dtype_gap
from trl.trainer.metrics import Metrics
from trl.types import Completion, Rollout, Scorer
from trl.weights.source import PolicyWeights


def engine_of(dtype: str | None) -> VLLMServerEngine:
    facts = ServerFacts(
        version="0.32.0",
        model="m",
        model_path="m",
        max_model_len=64,
        dev_mode=True,
        world_size=1,
        backend="nccl",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        dtype=dtype,
    )
    return VLLMServerEngine([Server(VLLMClient("http://127.0.0.1:9"), facts)])


@pytest.mark.parametrize(
    ("trainer", "server", "said"),
    [
        (torch.float32, "bfloat16", "float32"),
        (torch.bfloat16, "float16", "bfloat16"),
        (torch.float32, "float32", None),
        (torch.float32, None, None),
    ],
)
def test_a_gap_between_the_dtypes_is_reported_once(trainer, server, said, caplog):
    engine = engine_of(server)
    with caplog.at_level(logging.WARNING):
        report_dtype_gap(engine.scorers, PolicyWeights(random_model().to(trainer)))
    engine.close()
    messages = [record.getMessage() for record in caplog.records]
    if said is None:
        assert messages == []
    else:
        (message,) = messages
        assert f"weights are {said}," in message
        assert server in message


def test_mixed_weights_are_named_as_such(caplog):
    model = random_model().bfloat16()
    model.model.norm.float()
    engine = engine_of("bfloat16")
    with caplog.at_level(logging.WARNING):
        report_dtype_gap(engine.scorers, PolicyWeights(model))
    engine.close()
    assert "bfloat16 and float32" in caplog.text


def test_an_engine_rests_before_the_policy_scores():
    """So that the two never need the GPU's memory at once."""
    order = []

    def told(sequences):
        order.append("engine scores")
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    def own(batch):
        order.append("policy scores")
        return torch.full((batch.num_tokens,), -1.0)

    engine = ScriptedEngine([[1]], own_weights=True)
    engine.scorers = [Scorer("an engine", "float32", 64, told)]
    engine.sleep = lambda: order.append("engine sleeps") or True
    engine.update_weights = lambda weights, version: order.append("engine wakes")
    processes = SimpleNamespace(wait=lambda: None)
    weights = EngineWeights(
        engine, random_model(), processes, Metrics(), parity_steps=1, score=own, compute_dtype="float32"
    )
    for step in (0, 0):
        weights.bring_up_to_date(step)
        weights.compare([Rollout([10], Completion([11, 1], [], "stop"))], step)
        weights.rest()
    first = ["engine wakes", "engine scores", "engine sleeps", "policy scores", "engine sleeps"]
    assert order == [*first, "engine wakes", "engine sleeps"]


def test_an_engine_that_is_the_model_has_no_gap(caplog):
    with caplog.at_level(logging.WARNING):
        report_dtype_gap(ScriptedEngine([[1]]).scorers, PolicyWeights(random_model()))
    assert caplog.records == []
