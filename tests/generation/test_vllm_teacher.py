"""A teacher behind a server: what it is asked, what is made of its answers, and how it fails.

The stub's teacher is a table: after token 10 come 11, 12, 13 and 14 with 1/2, 1/4, 1/8 and 1/8, after 11 come 12 and 1
with 3/4 and 1/4, after any other token all 64 with the same probability.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fixtures.models import chain_logits
from fixtures.vllm_stub import VERSIONS, Fault, StubServer, running_stub

from trl.errors import (
    ConfigError,
    GenerationError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServerVersionError,
)
from trl.generation.vllm_client import TopLogps, VLLMClient
from trl.generation.vllm_teacher import ServerTeacher, TeacherLogps, connect_teacher

RECORDINGS = Path(__file__).parent.parent / "fixtures" / "recordings"
CHAIN = {10: {11: 0.5, 12: 0.25, 13: 0.125, 14: 0.125}, 11: {12: 0.75, 1: 0.25}}
TABLE = {"lm_head.weight": chain_logits(CHAIN).T / 8}
HALF, QUARTER, EIGHTH, THREE_QUARTERS = map(math.log, (0.5, 0.25, 0.125, 0.75))
UNIFORM = math.log(1 / 64)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.02)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with table_server() as stub:
        yield stub


def table_server(version: str = "0.32", **options: Any) -> Any:
    return running_stub(version, **{"weights": TABLE, **options})


@contextlib.contextmanager
def teacher_on(stub: StubServer, **options: Any) -> Iterator[ServerTeacher]:
    """A teacher that knows what it has to, with nothing asked so far."""
    teacher = connect_teacher(stub.url, **{"top_k": 2, "timeout": 5.0, "request_timeout": 5.0, **options})
    stub.calls.clear()
    try:
        yield teacher
    finally:
        teacher.close()


def scripted(*choices: Any) -> VLLMClient:
    """A client that gets these choices, with their places, as the one answer."""
    rows = [{"index": i, "finish_reason": "length", **choice} for i, choice in enumerate(choices)]
    answer = httpx.Response(200, json={"choices": rows})
    return VLLMClient("http://a:1", timeout=2.0, transport=httpx.MockTransport(lambda request: answer))


def place(**logps: tuple[float | None, int]) -> dict[str, Any]:
    """An entry of `prompt_logprobs`: `t7=(-1.0, 2)` is token 7 with its log-prob and rank."""
    return {name[1:]: {"logprob": logp, "rank": rank, "decoded_token": "x"} for name, (logp, rank) in logps.items()}


def assert_close(found: TeacherLogps, ids: Any, logps: Any, token_logps: Any) -> None:
    assert found.ids.tolist() == ids
    assert (found.ids.dtype, found.logps.dtype, found.token_logps.dtype) == (torch.long, torch.float32, torch.float32)
    torch.testing.assert_close(found.logps, torch.tensor(logps), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.token_logps, torch.tensor(token_logps), atol=1e-5, rtol=0)


# ---- the client ----


@pytest.mark.parametrize("version", VERSIONS)
def test_the_likeliest_tokens_come_in_order_and_the_actual_one_beside_them(version: str) -> None:
    """13 is the third after 10, and not among the two; 12 is the likeliest after 11."""
    with table_server(version) as server:
        first, second = server.client().prompt_top_logps([[10, 13], [10, 11, 12]], 2)
    assert (first.top_ids, second.top_ids) == ([[11, 12]], [[11, 12], [12, 1]])
    assert first.top_logps == [pytest.approx([HALF, QUARTER], abs=1e-5)]
    assert first.token_logps == pytest.approx([EIGHTH], abs=1e-5)
    assert second.top_logps[1] == pytest.approx([THREE_QUARTERS, QUARTER], abs=1e-5)
    assert second.token_logps == pytest.approx([HALF, THREE_QUARTERS], abs=1e-5)


def test_a_request_that_scores_has_the_models_own_distribution_and_no_text(server: StubServer) -> None:
    server.client().prompt_top_logps([[10, 13]], 2, model="policy")
    (call,) = server.of("/v1/completions")
    assert call.body == {
        "model": "policy",
        "prompt": [[10, 13]],
        "prompt_logprobs": 2,
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_no_sequences_are_no_request(server: StubServer) -> None:
    assert server.client().prompt_top_logps([], 2) == []
    assert server.calls == []


def test_the_actual_token_is_none_of_the_likeliest_where_it_is_only_as_likely() -> None:
    """vLLM gives it the rank of the last of those that are equal."""
    told = {"prompt_logprobs": [None, place(t9=(-1.0, 64), t0=(-1.0, 1), t1=(-1.0, 2))]}
    assert scripted(told).prompt_top_logps([[5, 9]], 2) == [TopLogps([[0, 1]], [[-1.0, -1.0]], [-1.0])]


def test_a_token_of_probability_zero_is_minus_infinity() -> None:
    told = {"prompt_logprobs": [None, place(t9=(-9999.0, 2), t0=(0.0, 1))]}
    assert scripted(told).prompt_top_logps([[5, 9]], 1) == [TopLogps([[0]], [[0.0]], [-math.inf])]


@pytest.mark.parametrize("version", ["0.23", "0.32", "0.33"])
def test_answers_of_real_servers_are_read(version: str) -> None:
    """The likeliest token came with the actual one, 41 and then 42, which was not it."""
    recording = json.loads((RECORDINGS / version / "completions_prompt_logprobs.json").read_text())
    (told,) = recording["response"]["choices"]
    (scored,) = scripted(told).prompt_top_logps([[40, 41, 42]], 1)
    entries = [(told["prompt_logprobs"][i], str(token)) for i, token in ((1, 41), (2, 42))]
    assert scored.token_logps == [entry[token]["logprob"] for entry, token in entries]
    others = [next(t for t in entry if t != token) for entry, token in entries]
    assert scored.top_ids == [[int(t)] for t in others]
    assert scored.top_logps == [[entry[t]["logprob"]] for (entry, _), t in zip(entries, others, strict=True)]
    assert scored.top_logps[0][0] > scored.token_logps[0]


@pytest.mark.parametrize(
    "told",
    [
        None,
        [None],
        [None, None],
        [None, {}],
        [None, place(t0=(-1.0, 1), t1=(-2.0, 2))],
        [None, place(t9=(-1.0, 1))],
        [None, place(t9=(-1.0, 1), t0=(-2.0, 2)), place(t9=(-1.0, 1), t0=(-2.0, 2))],
        [None, {"9": {"rank": 1}, "0": {"logprob": -1.0, "rank": 2}}],
        [None, {"a": {"logprob": -1.0, "rank": 1}, "9": {"logprob": -1.0, "rank": 2}}],
        [None, [-1.0, -2.0]],
        "garbage",
    ],
    ids=["none", "short", "null", "empty", "not the actual", "fewer", "long", "no logp", "no id", "list", "text"],
)
def test_a_place_without_its_log_probs_is_an_error_that_names_the_flag(told: Any) -> None:
    with pytest.raises(ServerError, match=r"log-probs of prompt tokens are missing.*`--max-logprobs -1`"):
        scripted({"prompt_logprobs": told}).prompt_top_logps([[5, 9]], 2)


def test_sequences_that_were_not_scored_are_an_error() -> None:
    with pytest.raises(ServerError, match="0 completions came back where 1 were asked for"):
        scripted().prompt_top_logps([[5, 9]], 2)
    client = VLLMClient("http://a:1", transport=httpx.MockTransport(lambda request: httpx.Response(200, json={})))
    with pytest.raises(ServerError, match="0 completions came back where 1 were asked for"):
        client.prompt_top_logps([[5, 9]], 2)


def test_the_whole_vocabulary_can_be_asked_for_where_nothing_is_capped() -> None:
    """After 10 only 11 to 14 can come: the probabilities are 1/2, 1/4, 1/8, 1/8 and 60 times next to nothing."""
    with table_server(max_logprobs=-1) as server:
        (scored,) = server.client().prompt_top_logps([[10, 13]], 64)
    assert [math.exp(p) for p in scored.top_logps[0]] == pytest.approx([0.5, 0.25, 0.125, 0.125] + [0.0] * 60, abs=1e-5)
    assert scored.top_ids[0][:4] == [11, 12, 13, 14]
    assert sorted(scored.top_ids[0]) == list(range(64))


@pytest.mark.parametrize(("k", "asked"), [(21, 21), (-1, 64)])
def test_a_cap_is_a_refusal(k: int, asked: int) -> None:
    words = f"Requested prompt logprobs of {asked}, which is greater than max allowed: 20.*`--max-logprobs -1`"
    with table_server() as server, pytest.raises(ServerError, match=words):
        server.client().prompt_top_logps([[10, 13]], k)


# ---- distributions ----


def test_every_completion_token_has_its_distribution_in_order(server: StubServer) -> None:
    """After 10 (the prompt) 13, after it 5: of equals the smallest ids come first. Then 11 after 10, 1 after 11."""
    with teacher_on(server) as teacher:
        found = teacher.distributions([([20, 10], [13, 5]), ([10], [11, 1])])
    assert_close(
        found,
        [[11, 12], [0, 1], [11, 12], [12, 1]],
        [[HALF, QUARTER], [UNIFORM, UNIFORM], [HALF, QUARTER], [THREE_QUARTERS, QUARTER]],
        [EIGHTH, UNIFORM, HALF, QUARTER],
    )
    ids, logps, token_logps = found
    assert (ids.shape, logps.shape, token_logps.shape) == ((4, 2), (4, 2), (4,))


def test_equal_sequences_are_asked_for_once(server: StubServer) -> None:
    """Also where prompt and completion meet in another place: 10 11 12 as (10) (11 12), twice, and (10 11) (12)."""
    sequences = [([10], [11, 12]), ([10], [13]), ([10], [11, 12]), ([10, 11], [12])]
    with teacher_on(server) as teacher:
        found = teacher.distributions(sequences)
    assert sorted(c.body["prompt"] for c in server.of("/v1/completions")) == [[[10, 11, 12]], [[10, 13]]]
    first, second = [HALF, QUARTER], [THREE_QUARTERS, QUARTER]
    assert_close(
        found,
        [[11, 12], [12, 1], [11, 12], [11, 12], [12, 1], [12, 1]],
        [first, second, first, first, second, second],
        [HALF, THREE_QUARTERS, EIGHTH, HALF, THREE_QUARTERS, THREE_QUARTERS],
    )


def test_the_order_is_that_of_the_sequences_whoever_comes_first() -> None:
    """The first is the last to be answered."""
    with table_server(delay=lambda prompt: 0.3 if prompt[-1] == 11 else 0.0) as server, teacher_on(server) as teacher:
        found = teacher.distributions([([10], [token]) for token in (11, 12, 13)])
        assert server.most_completions > 1
    assert found.token_logps.tolist() == pytest.approx([HALF, QUARTER, EIGHTH], abs=1e-5)


def test_nothing_is_asked_where_nothing_was_written(server: StubServer) -> None:
    with teacher_on(server) as teacher:
        found = teacher.distributions([([10], []), ([10], [11]), ([], [])])
        assert_close(found, [[11, 12]], [[HALF, QUARTER]], [HALF])
        assert [c.body["prompt"] for c in server.of("/v1/completions")] == [[[10, 11]]]
        nothing = teacher.distributions([([10], [])])
        assert [tuple(t.shape) for t in nothing] == [(0, 2), (0, 2), (0,)]
        assert len(server.calls) == 1
    assert [t.dtype for t in nothing] == [torch.long, torch.float32, torch.float32]


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    with table_server(delay=lambda prompt: 0.02) as server:
        first = connect_teacher(server.url, top_k=2)
        teacher = ServerTeacher(first.client, first.facts, top_k=2, max_in_flight=3)
        found = teacher.distributions([([10, i], [11]) for i in range(12)])
        teacher.close()
        assert server.most_completions == 3
    assert found.ids.shape == (12, 2)


# ---- failures while training ----


def test_a_sequence_without_room_for_one_more_token_is_refused_before_anything_is_asked() -> None:
    """The server holds 6 tokens and has to write one: 5 can be scored, 6 cannot."""
    with table_server(max_model_len=6) as server, teacher_on(server) as teacher:
        assert teacher.distributions([([10, 11], [12, 12, 12])]).ids.shape == (3, 2)
        server.calls.clear()
        words = r"Sequence 1 has 6 tokens.*scores 5 at most.*--max-model-len.*max_completion_length"
        with pytest.raises(GenerationError, match=words):
            teacher.distributions([([10], [11]), ([10, 11], [12, 12, 12, 12])])
        with pytest.raises(GenerationError, match="Sequence 1 has no prompt"):
            teacher.distributions([([10], [11]), ([], [11, 12])])
        assert server.calls == []


@pytest.mark.parametrize("kind", ["hang", "trickle"])
def test_no_answer_is_an_error_at_the_deadline(server: StubServer, kind: str) -> None:
    with teacher_on(server, request_timeout=0.4) as teacher:
        server.faults["/v1/completions"] = Fault(kind)
        with pytest.raises(ServerTimeoutError, match=r"no answer within 0\.4 s"):
            teacher.distributions([([10], [11]), ([10], [12])])


def test_a_server_that_dies_midway_is_an_error(server: StubServer) -> None:
    with teacher_on(server) as teacher:
        server.delay = lambda prompt: 0.0 if prompt[-1] == 11 else 60.0
        threading.Timer(0.3, server._end).start()
        with pytest.raises(ServerUnreachableError, match="Is the server running there"):
            teacher.distributions([([10], [token]) for token in (11, 12, 13)])
        assert len(server.of("/v1/completions")) == 3


def test_what_has_not_been_asked_when_one_fails_is_not_asked_any_more(server: StubServer) -> None:
    first = connect_teacher(server.url, top_k=2)
    teacher = ServerTeacher(first.client, first.facts, top_k=2, max_in_flight=1)
    server.calls.clear()
    server.delay = lambda prompt: 0.05
    server.faults["/v1/completions"] = Fault("status", "no memory", times=1)
    with pytest.raises(ServerError, match="answered 500: no memory"):
        teacher.distributions([([10, i], [11]) for i in range(50)])
    time.sleep(0.2)
    assert len(server.of("/v1/completions")) < 4
    assert teacher.distributions([([10], [11])]).ids.tolist() == [[11, 12]]
    teacher.close()


@pytest.mark.parametrize("text", ["<html></html>", "[1]", "{}", '{"choices": []}'])
def test_an_answer_that_is_none_is_an_error(server: StubServer, text: str) -> None:
    with teacher_on(server) as teacher:
        server.faults["/v1/completions"] = Fault("garbage", text)
        with pytest.raises(ServerError, match=r"is this vLLM|0 completions came back"):
            teacher.distributions([([10], [11])])


def test_a_broken_connection_is_tried_again(server: StubServer) -> None:
    with teacher_on(server) as teacher:
        server.faults["/v1/completions"] = Fault("drop", times=1)
        assert teacher.distributions([([10], [11])]).ids.tolist() == [[11, 12]]


@pytest.mark.parametrize("logp", ["NaN", "null"])
def test_log_probs_that_are_not_numbers_are_an_error(server: StubServer, logp: str) -> None:
    told = f'{{"11": {{"logprob": {logp}, "rank": 1}}}}'
    with teacher_on(server, top_k=1) as teacher:
        server.faults["/v1/completions"] = Fault(
            "garbage", f'{{"choices": [{{"index": 0, "prompt_logprobs": [null, {told}]}}]}}'
        )
        with pytest.raises(GenerationError, match=r"not numbers.*--dtype"):
            teacher.distributions([([10], [11])])


def test_a_token_that_the_student_does_not_have_is_an_error(server: StubServer) -> None:
    """The student knows ids below 12: the second likeliest after 10 is 12, the likeliest is 11."""
    with teacher_on(server, top_k=1, vocab_size=12) as teacher:
        assert teacher.distributions([([10], [11])]).ids.tolist() == [[11]]
    with (
        teacher_on(server, vocab_size=12) as teacher,
        pytest.raises(GenerationError, match="finds token 12 likely, and the student has 12 tokens"),
    ):
        teacher.distributions([([10], [11])])


# ---- before training ----


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dev_mode", [True, False])
def test_a_server_that_can_be_a_teacher(version: str, dev_mode: bool) -> None:
    with table_server(version, dev_mode=dev_mode, backend=None) as server, teacher_on(server, top_k=20) as teacher:
        assert teacher.facts.version == f"{version}.0"
        assert teacher.distributions([([10], [11])]).ids.shape == (1, 20)


def test_a_teacher_that_is_not_capped_gives_any_number(server: StubServer) -> None:
    with table_server(max_logprobs=-1) as server, teacher_on(server, top_k=64) as teacher:
        assert teacher.distributions([([10], [11])]).logps.exp().sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("dev_mode", [True, False])
def test_a_cap_below_what_the_loss_compares_is_found_before_training(dev_mode: bool) -> None:
    found = "gives at most 20 log-probs per token" if dev_mode else "Requested prompt logprobs of 21"
    words = f"{found}.*`loss_top_k` is 21: start it with `vllm serve TEACHER … --max-logprobs -1`"
    with table_server(dev_mode=dev_mode) as server, pytest.raises(ConfigError, match=words):
        connect_teacher(server.url, top_k=21, timeout=5.0)


@pytest.mark.parametrize("dev_mode", [True, False])
@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_no_log_probs(dev_mode: bool, mode: str) -> None:
    """Without dev mode the server does not tell; the stub's logits of two of 64 equals are -4.16 + 5 each."""
    with (
        table_server(dev_mode=dev_mode, logprobs_mode=mode) as server,
        pytest.raises(ConfigError, match=r"returns logits.*--logprobs-mode processed_logprobs"),
    ):
        connect_teacher(server.url, top_k=2, timeout=5.0)


def test_logits_that_could_be_log_probs_are_known_by_the_servers_word() -> None:
    place = '[null, {"0": {"logprob": -3.0, "rank": 1}}]'
    answer = Fault("garbage", f'{{"choices": [{{"index": 0, "prompt_logprobs": {place}}}]}}')
    with (
        table_server(logprobs_mode="raw_logits", faults={"/v1/completions": answer}) as server,
        pytest.raises(ConfigError, match="returns logits"),
    ):
        connect_teacher(server.url, top_k=1, timeout=5.0)


def test_a_student_with_more_tokens_is_found_before_training(server: StubServer) -> None:
    """The server has 64."""
    with pytest.raises(ConfigError, match="fewer tokens than the student's 65"):
        connect_teacher(server.url, top_k=2, vocab_size=65, timeout=5.0)
    with teacher_on(server, vocab_size=64) as teacher:
        assert teacher.distributions([([10], [63])]).token_logps < -50
    with teacher_on(server, vocab_size=70, student_tokens=64) as teacher:
        assert teacher.distributions([([10], [11])]).ids.tolist() == [[11, 12]]


def test_nobody_answers() -> None:
    with table_server() as server:
        url = server.url
    with pytest.raises(ServerUnreachableError, match=r"No vLLM server is ready.*`vllm_server_timeout`"):
        connect_teacher(url, top_k=2, timeout=0.2)


def test_a_server_that_loads_is_waited_for(server: StubServer) -> None:
    server.loading = True

    def ready() -> None:
        server.loading = False

    threading.Timer(0.3, ready).start()
    with teacher_on(server) as teacher:
        assert teacher.facts.model == "policy"


def test_an_unsupported_version_is_refused_unless_it_is_allowed() -> None:
    with table_server("0.34") as server:
        with pytest.raises(ServerVersionError, match=r"vLLM 0\.34\.0 is outside"):
            connect_teacher(server.url, top_k=2, timeout=5.0)
        with pytest.warns(UserWarning, match="outside"), teacher_on(server, allow_unsupported_version=True):
            pass


def test_another_failure_of_the_trial_is_told_as_it_is(server: StubServer) -> None:
    server.faults["/v1/completions"] = Fault("status", "no memory")
    with pytest.raises(ServerError, match="answered 500: no memory"):
        connect_teacher(server.url, top_k=2, timeout=5.0)


def test_the_key_is_sent_and_asked_for() -> None:
    with table_server(api_key="secret") as server:
        with teacher_on(server, api_key="secret") as teacher:
            assert teacher.distributions([([10], [11])]).ids.tolist() == [[11, 12]]
        with pytest.raises(ServerError, match="Set `vllm_server_api_key`"):
            connect_teacher(server.url, top_k=2, timeout=5.0)


def test_a_url_has_a_scheme() -> None:
    with pytest.raises(ConfigError, match=r"`teacher_model_server_url` is no URL .got 'host:8001'"):
        connect_teacher("host:8001", top_k=2)
