"""The stub answers as real servers did: same status, same fields, same types, in three versions."""

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures.vllm_stub import Fault, StubServer, running_stub

FOLDER = Path(__file__).parent.parent / "fixtures" / "recordings"
RECORDINGS = sorted(f"{p.parent.name}/{p.stem}" for p in FOLDER.glob("*/*.json"))

START = ("POST", "/start_weight_update", {})
FAILED = ("POST", "/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": [], "foo": 1}})
# What the real server had been asked before.
BEFORE: dict[str, list[tuple[str, str, Any]]] = {
    "wt_start_twice": [START],
    "wt_update_mismatch": [START],
    "nccl_update_not_init": [START],
    "finish_extra": [START],
    "finish_without_any_weight": [START],
    "restart_after_failed": [START, FAILED],
    "completion_while_paused_abort": [("POST", "/pause?mode=abort", None)],
}


def shape(value: Any) -> Any:
    """The value with types in place of what is in it; tables that are keyed by tokens have entries of one type."""
    if isinstance(value, dict):
        if value and all(key.removeprefix("token_id:").isdigit() for key in value):
            return {"a token": shape(next(iter(value.values())))}
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[-1])] if value else []
    return type(value).__name__


@pytest.fixture(scope="module")
def stubs():
    """Stubs by version and whether they are plain, without dev mode and scale-out, started when first asked for."""
    with contextlib.ExitStack() as running:
        known: dict[tuple[str, bool], StubServer] = {}

        def stub(version: str, plain: bool) -> StubServer:
            if (version, plain) not in known:
                options = {"dev_mode": not plain, "scale_out": not plain, "max_logprobs": 20 if plain else -1}
                known[version, plain] = running.enter_context(running_stub(version, vocab_size=1024, **options))
            known[version, plain].forget()
            return known[version, plain]

        yield stub


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_stub_answers_like_a_real_server(name, stubs):
    version, case = name.split("/")
    recording = json.loads((FOLDER / f"{name}.json").read_text())
    request = recording["request"]
    server = stubs(version, case.startswith("plain_"))
    if isinstance(request, dict) and "model" in request and case != "err_bad_model":
        server.model = request["model"]
    with httpx.Client(base_url=server.url, timeout=10, verify=False) as http:
        for method, path, body in BEFORE.get(case, []):
            http.request(method, path, json=body)
        if recording["status"] == -1:
            with pytest.raises(httpx.ReadTimeout):
                http.request(recording["method"], recording["path"], json=request, timeout=0.3)
            return
        answer = http.request(recording["method"], recording["path"], json=request)
    assert answer.status_code == recording["status"]
    found = answer.json() if answer.content else ""
    assert shape(found) == shape(recording["response"])


def test_errors_of_workers_have_the_words_of_real_ones():
    """The client tells situations apart by these words."""
    for case, words in {
        "nccl_update_not_init": "not initialized",
        "wt_start_twice": "already active",
        "wt_update_without_start": "must be called before",
        "wt_finish_without_start": "without a matching start",
        "wt_init_badfield": "unexpected keyword argument 'foo'",
    }.items():
        recording = json.loads((FOLDER / "0.32" / f"{case}.json").read_text())
        assert words in recording["response"]["error"]["message"]
        with running_stub("0.32") as server, httpx.Client(base_url=server.url, verify=False) as http:
            for method, path, body in BEFORE.get(case, []):
                http.request(method, path, json=body)
            answer = http.request(recording["method"], recording["path"], json=recording["request"])
        assert words in answer.json()["error"]["message"]


def test_a_completion_without_weights_kills_the_server():
    with running_stub("0.32") as server, httpx.Client(base_url=server.url, timeout=5, verify=False) as http:
        http.post("/start_weight_update", json={})
        answer = http.post("/v1/completions", json={"prompt": [[5]], "max_tokens": 1})
        assert answer.status_code == 500
        assert "EngineCore encountered an issue" in answer.json()["error"]["message"]
        server._thread.join(5)
        with pytest.raises(httpx.ConnectError):
            http.get("/health")


def test_every_fault_shows():
    with running_stub("0.32") as server, httpx.Client(base_url=server.url, timeout=0.3, verify=False) as http:
        expected = {"hang": httpx.ReadTimeout, "trickle": httpx.ReadTimeout, "drop": httpx.RemoteProtocolError}
        expected |= {"after": httpx.RemoteProtocolError}
        for kind, error in expected.items():
            server.faults["/version"] = Fault(kind)
            with pytest.raises(error):
                http.get("/version")
        server.faults["/version"] = Fault("status", "words", status=418)
        assert (http.get("/version").status_code, "words" in http.get("/version").text) == (418, True)
        server.faults["/version"] = Fault("status", times=1)
        assert [http.get("/version").status_code for _ in range(2)] == [500, 200]
        server.restart()
        assert http.get("/is_paused").json() == {"is_paused": False}
