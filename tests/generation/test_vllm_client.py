"""The HTTP client: what it sends, what it makes of answers, and how it fails."""

import json
import time

import httpx
import pytest
from fixtures.vllm_stub import VERSIONS, Fault, running_stub

from trl.errors import ServerError, ServerTimeoutError, ServerUnreachableError
from trl.generation.vllm_client import VLLMClient

PARAMS = {"n": 2, "max_tokens": 8, "temperature": 1.0, "logprobs": 0}


@pytest.fixture(scope="module")
def stub():
    with running_stub("0.32") as server:
        yield server


@pytest.fixture
def server(stub):
    stub.faults.clear()
    stub.calls.clear()
    stub.forget()
    return stub


def scripted(*answers: httpx.Response) -> tuple[VLLMClient, list[httpx.Request]]:
    """A client whose transport gives these answers, one after the other, and the requests it made."""
    requests: list[httpx.Request] = []
    rest = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return rest.pop(0)

    return VLLMClient("http://a:1", timeout=2.0, transport=httpx.MockTransport(answer)), requests


def test_url_is_made_of_host_and_port_or_taken_as_given():
    assert VLLMClient(host="10.0.0.1", server_port=9).base_url == "http://10.0.0.1:9"
    assert VLLMClient("https://h:1/prefix/").base_url == "https://h:1/prefix"


@pytest.mark.parametrize("version", VERSIONS)
def test_completions_are_prompt_major_and_carry_ids_and_logps(version):
    with running_stub(version) as server:
        choices = server.client().completions([[5, 10], [20]], PARAMS)
    assert [c.index for c in choices] == [0, 1, 2, 3]
    assert [c.token_ids for c in choices] == [[11, 12, 1]] * 2 + [[21, 22, 1]] * 2
    assert all(c.logps == [-0.25] * 3 and c.finish_reason == "stop" for c in choices)


def test_requests_carry_token_ids_and_ask_for_token_ids(server):
    server.client().completions([[5, 10]], PARAMS, model="policy")
    (call,) = server.of("/v1/completions")
    assert call.body == {
        "prompt": [[5, 10]],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "model": "policy",
        **PARAMS,
    }


def test_choices_may_come_in_any_order():
    rows = [
        {"index": i, "token_ids": [i], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"} for i in (1, 0)
    ]
    client, _ = scripted(httpx.Response(200, json={"choices": rows}))
    assert [c.token_ids for c in client.completions([[5], [6]], {"n": 1})] == [[0], [1]]


def test_missing_choices_are_an_error():
    row = {"index": 0, "token_ids": [1], "logprobs": None, "finish_reason": "stop"}
    client, _ = scripted(httpx.Response(200, json={"choices": [row]}))
    with pytest.raises(ServerError, match=r"1 completions came back where 2 were asked for"):
        client.completions([[5]], {"n": 2})


@pytest.mark.parametrize(("ids", "logps"), [(None, [-1.0]), ([1, 2], [-1.0])])
def test_ids_without_their_logps_are_an_error(ids, logps):
    row = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": logps}, "finish_reason": "stop"}
    client, _ = scripted(httpx.Response(200, json={"choices": [row]}))
    with pytest.raises(ServerError, match="token ids with 1 log-probs"):
        client.completions([[5]], {"n": 1})


def test_a_removed_token_has_probability_zero():
    row = {"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-9999.0]}, "finish_reason": "stop"}
    client, _ = scripted(httpx.Response(200, json={"choices": [row]}))
    assert client.completions([[5]], {"n": 1})[0].logps == [float("-inf")]


def test_prompts_are_scored_token_by_token(server):
    assert server.client().prompt_logps([[5, 6, 7], [8, 9]]) == [[-0.25, -0.25], [-0.25]]
    (call,) = server.of("/v1/completions")
    assert (call.body["temperature"], call.body["prompt_logprobs"], call.body["max_tokens"]) == (1.0, 0, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_generate_reads_both_schemas_of_logprobs(version):
    with running_stub(version) as server:
        (choice,) = server.client().generate([5, 10], {"max_tokens": 2, "logprobs": 0})
    assert (choice.token_ids, choice.logps, choice.finish_reason) == ([11, 12], [-0.25, -0.25], "length")


def test_logps_of_another_token_are_refused():
    logprobs = {"content": [{"token": "token_id:8", "logprob": -1.0}]}
    row = {"index": 0, "token_ids": [9], "logprobs": logprobs, "finish_reason": "stop"}
    client, _ = scripted(httpx.Response(200, json={"choices": [row]}))
    with pytest.raises(ServerError, match="token 8 for token 9"):
        client.generate([1], {"logprobs": 0})


@pytest.mark.parametrize("version", ["0.30", "0.32"])
def test_missing_image_routes_name_the_flag(version):
    """404 in some versions, 403 in others."""
    with running_stub(version, scale_out=False) as server:
        client = server.client()
        for call in (lambda: client.render([]), lambda: client.generate([1], {})):
            with pytest.raises(ServerError, match="--enable-scale-out") as caught:
                call()
            assert caught.value.status == (403 if version == "0.32" else 404)


def test_missing_dev_mode_names_the_variable():
    with running_stub("0.32", dev_mode=False) as server, pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        server.client().pause()


def test_missing_transfer_config_names_the_flag():
    with running_stub("0.32", backend=None) as server, pytest.raises(ServerError, match="--weight-transfer-config"):
        server.client().init_weight_transfer({})


def test_an_error_has_method_path_status_and_the_servers_words(server):
    with pytest.raises(ServerError) as caught:
        server.client().completions([[5]], {"n": 1, "max_tokens": 1, "logprobs": 50})
    error = caught.value
    assert (error.method, error.path, error.status) == ("POST", "/v1/completions", 400)
    assert error.server_message == "Requested sample logprobs of 50, which is greater than max allowed: 20"
    assert str(error) == (
        f"POST {server.url}/v1/completions answered 400: {error.server_message}. "
        "Start the server with `--max-logprobs -1`."
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ("<html>Bad gateway</html>", "Bad gateway"),
    ],
)
def test_the_servers_words_are_found_in_any_form(body, words):
    client, _ = scripted(httpx.Response(418, text=body))
    with pytest.raises(ServerError, match=words):
        client.version()


def test_the_key_is_sent_and_its_absence_explained(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with running_stub("0.32", api_key="secret") as server:
        assert server.client(api_key="secret").models()[0]["id"] == "policy"
        with pytest.raises(ServerError, match=r"401.*Unauthorized.*vllm_server_api_key.*VLLM_API_KEY"):
            server.client().models()
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert server.client().models()[0]["id"] == "policy"


@pytest.mark.parametrize("kind", ["hang", "trickle"])
def test_no_answer_is_an_error_at_the_deadline(server, kind):
    server.faults["/v1/completions"] = Fault(kind)
    began = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=r"POST http://127.*/v1/completions: no answer within"):
        server.client().completions([[5]], PARAMS, deadline=0.5)
    assert time.monotonic() - began < 2.5


def test_a_late_answer_counts_when_it_comes_in_time(server):
    server.faults["/version"] = Fault("late", seconds=0.2)
    assert server.client(timeout=5.0).version() == "0.32.0"


def test_nobody_there_is_an_error_that_names_the_server():
    with running_stub("0.32") as server:
        client = server.client()
        server.stop()
        with pytest.raises(ServerUnreachableError, match=f"{server.url}/version.*Is the server running there"):
            client.version()


REPEATABLE = {
    "/version": lambda c: c.version(),
    "/v1/models": lambda c: c.models(),
    "/get_world_size": lambda c: c.world_size(),
    "/server_info": lambda c: c.server_info(),
    "/v1/completions": lambda c: c.completions([[5]], PARAMS),
    "/pause": lambda c: c.pause(),
    "/resume": lambda c: c.resume(),
    "/weight_info": lambda c: c.weight_version(),
    "/reset_prefix_cache": lambda c: c.reset_prefix_cache(),
    "/reset_encoder_cache": lambda c: c.reset_encoder_cache(),
}
ONCE_ONLY = {
    "/init_weight_transfer_engine": lambda c: c.init_weight_transfer({"packed": True}),
    "/start_weight_update": lambda c: c.start_weight_update(),
    "/update_weights": lambda c: c.update_weights({"names": []}),
    "/finish_weight_update": lambda c: c.finish_weight_update(),
}


@pytest.mark.parametrize("path", REPEATABLE)
def test_what_may_run_twice_is_tried_again(server, path, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.01)
    server.faults[path] = Fault("drop", times=1)
    REPEATABLE[path](server.client(timeout=5.0))
    assert len(server.of(path)) == 2


@pytest.mark.parametrize("path", ONCE_ONLY)
def test_what_may_not_run_twice_is_not(server, path):
    server.faults[path] = Fault("drop")
    with pytest.raises(ServerUnreachableError):
        ONCE_ONLY[path](server.client(timeout=5.0))
    assert len(server.of(path)) == 1


def test_a_connection_that_keeps_breaking_is_given_up(server, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.01)
    server.faults["/version"] = Fault("drop")
    with pytest.raises(ServerUnreachableError):
        server.client(timeout=60.0).version()
    assert len(server.of("/version")) == 3


def test_an_overloaded_server_is_asked_until_the_deadline(monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.01)
    busy = [httpx.Response(503, json={"error": {"message": "Generation is paused."}}) for _ in range(5)]
    client, requests = scripted(*busy, httpx.Response(200, json={"version": "0.33.0"}))
    assert client.version() == "0.33.0"
    assert len(requests) == 6


def test_a_refusal_is_not_repeated():
    client, requests = scripted(httpx.Response(400, json={"error": {"message": "no"}}))
    with pytest.raises(ServerError, match="no"):
        client.version()
    assert len(requests) == 1


@pytest.mark.parametrize("text", ["<html></html>", "[1]", '{"name": "another server"}'])
def test_a_server_that_is_not_vllm_is_told_apart(text):
    client, _ = scripted(httpx.Response(200, text=text))
    with pytest.raises(ServerError, match="is this vLLM"):
        client.version()


@pytest.mark.parametrize("version", VERSIONS)
def test_bodies_are_json_objects_in_every_version(version):
    """0.23 and 0.24 refuse a start without one."""
    with running_stub(version) as server:
        client = server.client()
        client.start_weight_update()
        client.finish_weight_update()
        client.reset_prefix_cache()
        assert [c.body for c in server.calls] == [{}, {}, {}]


def test_a_cache_that_was_not_reset_is_an_error():
    client, _ = scripted(httpx.Response(200, json={"success": False}))
    with pytest.raises(ServerError, match="the prefix cache was not reset"):
        client.reset_prefix_cache()


def test_waiting_ends_when_the_server_is_ready(server):
    server.loading = True
    client = server.client()
    assert not client.health()
    with pytest.raises(ServerUnreachableError, match=r"after 0.3 s \(GET /health answers 503\).*vllm-serve"):
        client.wait_until_ready(0.3, interval=0.05)
    server.loading = False
    client.wait_until_ready(0.3)


def test_waiting_for_a_server_that_hangs_ends_in_time(server):
    server.faults["/health"] = Fault("hang")
    began = time.monotonic()
    with pytest.raises(ServerUnreachableError, match="no answer within"):
        server.client().wait_until_ready(0.5, interval=0.1)
    assert time.monotonic() - began < 2.5


def test_proxies_of_the_environment_are_left_out(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert server.client().version() == "0.32.0"


def test_bodies_are_what_was_asked_for():
    client, requests = scripted(*(httpx.Response(200, json={}) for _ in range(3)))
    client.init_weight_transfer({"a": 1})
    client.update_weights({"b": 2})
    client.finish_weight_update("step-7")
    assert [json.loads(r.content) for r in requests] == [
        {"init_info": {"a": 1}},
        {"update_info": {"b": 2}},
        {"weight_version": "step-7"},
    ]
