"""The engine over servers: what it asks for, how results come, and how it fails."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fixtures.syncs import small_model, sync_with
from fixtures.vllm_stub import VERSIONS, Fault, StubServer, running_stub

from trl.errors import ConfigError, GenerationError, ServerError, ServerTimeoutError, WeightSyncError
from trl.generation.vllm_probe import probe
from trl.generation.vllm_server import Server, VLLMServerEngine, request_params
from trl.types import Completion, Prompt, Sampling
from trl.weights.source import PolicyWeights

SAMPLING = Sampling(n=2, max_tokens=8)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.02)


@pytest.fixture
def server():
    with running_stub("0.32") as stub:
        yield stub


def engine_over(*stubs: StubServer, syncs: bool = False, **options) -> VLLMServerEngine:
    servers = []
    for stub in stubs:
        client = stub.client()
        servers.append(Server(client, probe(client), sync_with(stub) if syncs else None))
        stub.calls.clear()
    return VLLMServerEngine(servers, **options)


def complete(engine, prompts, sampling=SAMPLING):
    """Completions in the order of the prompts, and the order in which they came."""
    got, order = {}, []
    for index, completions in engine.generate([Prompt(ids) for ids in prompts], sampling):
        assert index not in got
        got[index] = completions
        order.append(index)
    return [got[i] for i in range(len(prompts))], order


# ---- what is asked for ----


@pytest.mark.parametrize("version", VERSIONS)
def test_every_row_gets_completions_of_its_own_prompt(version):
    """Whatever the pattern: equal prompts side by side or apart, single tokens, unequal lengths."""
    prompts = [[5], [9, 20], [5], [9, 20], [9, 20], [7, 7, 7, 30], [30], [5]]
    with running_stub(version) as server:
        engine = engine_over(server)
        completions, _ = complete(engine, prompts, Sampling(n=3, max_tokens=8))
        for prompt, group in zip(prompts, completions, strict=True):
            assert [c.token_ids for c in group] == [[prompt[-1] + 1, prompt[-1] + 2, 1]] * 3
        bodies = [c.body for c in server.of("/v1/completions")]
        assert sorted(b["prompt"] for b in bodies) == sorted([p] for p in prompts)
        assert sum(len(b["prompt"]) * b["n"] for b in bodies) == 3 * len(prompts)
        engine.close()


def test_every_sampling_field_is_sent(server):
    """What is left out would come from the model's generation config."""
    engine = engine_over(server)
    sampling = Sampling(n=2, max_tokens=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, repetition_penalty=1.1)
    complete(engine, [[5]], sampling)
    (call,) = server.of("/v1/completions")
    assert call.body == {
        "model": "policy",
        "prompt": [[5]],
        "n": 2,
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    engine.close()


def test_log_probs_nobody_wants_are_not_asked_for(server):
    engine = engine_over(server)
    (group,), _ = complete(engine, [[5]], Sampling(n=2, max_tokens=3, with_logps=False))
    assert [(c.token_ids, c.logps) for c in group] == [([6, 7, 1], [])] * 2
    assert "logprobs" not in server.of("/v1/completions")[0].body
    engine.close()


def test_defaults_are_sent_too():
    params = request_params(Sampling())
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert params["repetition_penalty"] == 1.0


def test_further_settings_go_by_the_names_of_either_library():
    extra = {"max_new_tokens": 7, "min_new_tokens": 2, "stop_strings": ["x"], "seed": 3, "top_k": 9}
    params = request_params(Sampling(extra=extra))
    assert (params["max_tokens"], params["min_tokens"], params["stop"], params["seed"]) == (7, 2, ["x"], 3)
    assert params["top_k"] == 9
    assert request_params(Sampling(extra={"do_sample": False}))["temperature"] == 0.0
    assert request_params(Sampling(extra={"do_sample": True}))["temperature"] == 1.0


@pytest.mark.parametrize("name", ["n", "logprobs", "prompt", "stream", "echo", "num_beams", "guided_regex"])
def test_settings_that_a_server_would_ignore_are_refused(name):
    with pytest.raises(ConfigError, match=f"`generation_kwargs` has `{name}`"):
        request_params(Sampling(extra={name: 1}))


def test_structured_outputs_are_sent(server):
    engine = engine_over(server, structured_outputs={"regex": "[0-9]"})
    complete(engine, [[5]])
    assert server.of("/v1/completions")[0].body["structured_outputs"] == {"regex": "[0-9]"}
    engine.close()


def test_several_greedy_completions_are_asked_for_once(server):
    engine = engine_over(server)
    completions, _ = complete(engine, [[5]], Sampling(n=3, max_tokens=8, temperature=0.0))
    assert [c.token_ids for c in completions[0]] == [[6, 7, 1]] * 3
    assert [c.body["n"] for c in server.of("/v1/completions")] == [1]
    engine.close()


def test_completions_carry_reason_logps_and_version(server):
    engine = engine_over(server)
    engine.policy_version = 4
    [[cut]], _ = complete(engine, [[5]], Sampling(n=1, max_tokens=2))
    [[whole]], _ = complete(engine, [[5]], Sampling(n=1, max_tokens=3))
    engine.close()
    assert cut == Completion([6, 7], [-0.25, -0.25], "length", 4)
    assert whole == Completion([6, 7, 1], [-0.25, -0.25, -0.25], "stop", 4)


# ---- context ----


@pytest.mark.parametrize("version", ["0.28", "0.32"])
def test_completions_are_cut_to_the_context(version):
    """Older servers refuse what does not fit, newer ones cut it."""
    with running_stub(version, max_model_len=6) as server:
        engine = engine_over(server)
        completions, _ = complete(engine, [[5, 5, 5, 5], [5]], Sampling(n=1, max_tokens=5))
        assert [len(c[0].token_ids) for c in completions] == [2, 3]
        by_length = {len(c.body["prompt"][0]): c.body["max_tokens"] for c in server.of("/v1/completions")}
        assert by_length == {4: 2, 1: 5}
        engine.close()


def test_a_prompt_that_fills_the_context_is_refused_before_any_request():
    with running_stub("0.32", max_model_len=4) as server:
        engine = engine_over(server)
        with pytest.raises(GenerationError, match=r"Prompt 1 has 4 tokens.*context is 4.*--max-model-len"):
            complete(engine, [[5], [5, 5, 5, 5]])
        assert server.calls == []
        engine.close()


# ---- many at a time ----


def test_results_come_as_they_finish():
    with running_stub("0.32", delay=lambda prompt: 0.4 if prompt[-1] == 5 else 0.0) as server:
        engine = engine_over(server)
        _, order = complete(engine, [[5], [6], [7], [8]])
        assert order[-1] == 0
        assert server.most_completions > 1
        engine.close()


def test_no_more_requests_are_in_flight_than_allowed():
    with running_stub("0.32", delay=lambda prompt: 0.02) as server:
        engine = engine_over(server, max_in_flight=3)
        complete(engine, [[i] for i in range(4, 24)])
        assert server.most_completions == 3
        engine.close()


def test_a_group_stays_on_one_of_several_servers():
    with running_stub("0.32") as one, running_stub("0.28") as two:
        engine = engine_over(one, two)
        prompts = [[i] for i in range(4, 14)]
        completions, _ = complete(engine, prompts, Sampling(n=4, max_tokens=8))
        assert [[c.token_ids[0] for c in group] for group in completions] == [[p[0] + 1] * 4 for p in prompts]
        seen = [sorted(c.body["prompt"][0][0] for c in stub.of("/v1/completions")) for stub in (one, two)]
        assert seen == [[4, 6, 8, 10, 12], [5, 7, 9, 11, 13]]
        assert {c.body["n"] for stub in (one, two) for c in stub.of("/v1/completions")} == {4}
        engine.close()


def test_what_is_not_asked_for_any_more_is_not_sent():
    with running_stub("0.32", delay=lambda prompt: 0.05) as server:
        engine = engine_over(server, max_in_flight=1)
        results = engine.generate([Prompt([i]) for i in range(4, 54)], SAMPLING)
        next(results)
        results.close()
        time.sleep(0.3)
        assert len(server.of("/v1/completions")) < 5
        engine.close()


def test_no_prompts_are_no_requests(server):
    engine = engine_over(server)
    assert complete(engine, []) == ([], [])
    assert server.calls == []
    engine.close()


# ---- failures ----


def test_a_refusal_reaches_the_caller(server):
    engine = engine_over(server)
    with pytest.raises(ServerError, match="out of vocabulary") as caught:
        complete(engine, [[5], [999], [6]])
    assert (caught.value.method, caught.value.path, caught.value.status) == ("POST", "/v1/completions", 400)
    assert complete(engine, [[5]])[0][0][0].token_ids == [6, 7, 1]
    engine.close()


@pytest.mark.parametrize("kind", ["hang", "trickle"])
def test_no_answer_is_an_error_at_the_deadline(server, kind):
    engine = engine_over(server, request_timeout=0.5)
    server.faults["/v1/completions"] = Fault(kind)
    began = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=r"no answer within 0\.5 s"):
        complete(engine, [[5], [6]])
    assert time.monotonic() - began < 2.5
    engine.close()


def test_a_broken_connection_is_tried_again(server):
    engine = engine_over(server)
    server.faults["/v1/completions"] = Fault("drop", times=1)
    assert complete(engine, [[5]])[0][0][0].token_ids == [6, 7, 1]
    engine.close()


def test_a_dead_engine_is_told_and_what_to_do(server):
    engine = engine_over(server)
    server.state.start()
    with pytest.raises(ServerError, match=r"EngineCore encountered an issue.*restart the server"):
        complete(engine, [[5]])
    engine.close()


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_an_aborted_request_is_no_completion(version):
    with running_stub(version, delay=lambda prompt: 5.0) as server:
        engine, other = engine_over(server), server.client()
        results = engine.generate([Prompt([5])], SAMPLING)
        threading.Timer(0.2, other.pause, args=("abort",)).start()
        with pytest.raises(GenerationError, match="aborted a request: somebody else paused it"):
            next(results)
        engine.close()


def test_a_paused_server_is_waited_for():
    """0.33 refuses requests meanwhile, earlier ones let them hang."""
    for version in ("0.32", "0.33"):
        with running_stub(version) as server:
            engine, other = engine_over(server), server.client()
            other.pause("abort")
            threading.Timer(0.3, other.resume).start()
            assert complete(engine, [[5]])[0][0][0].token_ids == [6, 7, 1]
            engine.close()


# ---- weights ----


def test_weights_reach_all_servers_in_their_own_dtype():
    model = small_model()
    with running_stub("0.32", dtype="torch.bfloat16") as one, running_stub("0.26", backend="shm") as two:
        engine = engine_over(one, two, syncs=True)
        engine.update_weights(PolicyWeights(model), 3)
        assert {t.dtype for t in one.state.weights.values()} == {torch.bfloat16}
        assert {t.dtype for t in two.state.weights.values()} == {torch.float32}
        assert torch.equal(one.state.weights["first.weight"], model["first"].weight.bfloat16())
        assert [r.num_bytes for r in engine.last_sync] == [70, 140]
        assert complete(engine, [[5]])[0][0][0].policy_version == 3
        engine.close()


def test_one_server_that_fails_does_not_leave_the_others_in_the_middle():
    with running_stub("0.32") as one, running_stub("0.32") as two:
        engine = engine_over(one, two, syncs=True)
        engine.update_weights(PolicyWeights(small_model()), 1)
        one.state.broken = "no memory"
        with pytest.raises(WeightSyncError, match="no memory"):
            engine.update_weights(PolicyWeights(small_model(1)), 2)
        assert not one.state.empty
        assert not two.state.empty
        assert engine.policy_version == 1
        engine.update_weights(PolicyWeights(small_model(1)), 2)
        assert all(torch.equal(s.state.weights["first.weight"], small_model(1)["first"].weight) for s in (one, two))
        engine.close()


def test_a_server_restarted_between_update_and_generation_gets_the_weights_again():
    model = small_model()
    with running_stub("0.32") as server:
        engine = engine_over(server, syncs=True)
        engine.update_weights(PolicyWeights(model), 1)
        server.restart()
        complete(engine, [[5]])
        assert torch.equal(server.state.weights["first.weight"], model["first"].weight)
        assert server.state.label == "step-1"
        engine.close()


def test_a_server_that_is_gone_is_an_error_and_used_again_when_it_is_back():
    with running_stub("0.32") as server:
        engine = engine_over(server, syncs=True)
        engine.update_weights(PolicyWeights(small_model()), 1)
        server.stop()
        with pytest.raises(ServerError, match="Is the server running there"):
            complete(engine, [[5]])
        server.restart()
        assert complete(engine, [[5]])[0][0][0].token_ids == [6, 7, 1]
        assert "first.weight" in server.state.weights
        engine.close()


# ---- the process ----

SCRIPT = """
import sys, threading
sys.path.insert(0, {tests!r})
import torch
from fixtures.syncs import sync_with
from fixtures.vllm_stub import Fault, running_stub
from trl.errors import WeightSyncError
from trl.generation.vllm_probe import probe
from trl.generation.vllm_server import Server, VLLMServerEngine
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights

running = running_stub("0.32", faults={{p: Fault("hang") for p in ("/v1/completions", "/update_weights")}})
stub = running.__enter__()
client = stub.client(timeout=60.0)
engine = VLLMServerEngine([Server(client, probe(client), sync_with(stub, 1.0))])
threading.Thread(target=lambda: next(engine.generate([Prompt([5])], Sampling())), daemon=True).start()
while not stub.of("/v1/completions"):
    pass
try:
    # More than the buffers of a connection hold: the broadcast is stuck when the process ends.
    engine.update_weights(PolicyWeights(torch.nn.Linear(2048, 4096)), 1)
except WeightSyncError as error:
    print(error.phase, [t.name for t in threading.enumerate() if not t.daemon])
"""


def test_the_process_ends_while_a_request_hangs_and_a_broadcast_is_stuck():
    script = SCRIPT.format(tests=str(Path(__file__).parent.parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "update ['MainThread']", done.stderr
    assert done.returncode == 0, done.stderr
