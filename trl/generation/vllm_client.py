"""HTTP client of `vllm serve`: typed calls of its documented endpoints, each with a deadline.

The client is policy: which call, which body, what an answer means, what to say when it fails. How bytes travel is the
transport's affair (`httpx.BaseTransport`). Nothing here needs vLLM.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from trl.errors import ServerError, ServerTimeoutError, ServerUnreachableError

Json = dict[str, Any]

# A call that may run twice without harm is tried again when the connection breaks or the server is overloaded.
_RETRY_STATUS = (502, 503)
_RETRY_PAUSE_S = 0.5
# A connection that breaks again and again has a reason: what is asked for may be what breaks it.
_MAX_BROKEN_CONNECTIONS = 3
# vLLM writes a token that truncation removed as this instead of minus infinity.
_REMOVED = -9999.0
# A request that only scores its prompt: the model's own distribution, and the one token that has to be generated.
_SCORING = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a request.

    Attributes:
        index: place in the request, prompt-major: `prompt * n + j`.
        token_ids: generated ids, the end-of-sequence id included.
        logps: log-prob of each, under the server's log-prob mode.
        finish_reason: `stop`, `length` or `abort`.
    """

    index: int
    token_ids: list[int]
    logps: list[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class TopLogps:
    """What a model says of the tokens of a sequence of length L, the first left out.

    Attributes:
        top_ids, top_logps: `[L - 1][k]` the k likeliest ids and their log-probs, descending.
        token_logps: `[L - 1]` log-prob of the token that is there.
    """

    top_ids: list[list[int]]
    top_logps: list[list[float]]
    token_logps: list[float]


class VLLMClient:
    """Calls of one server.

    Args:
        base_url: scheme, host, port and path prefix; made of `host` and `server_port` when not given.
        api_key: sent as bearer token; `VLLM_API_KEY` of the environment when not given.
        timeout: deadline of a call that names none, in seconds.
        transport: how requests travel; httpx's own when not given.
    """

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        server_port: int = 8000,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        transport: httpx.BaseTransport | None = None,
        max_connections: int = 256,
    ):
        self.base_url = (base_url or f"http://{host}:{server_port}").rstrip("/")
        self.timeout = timeout
        key = api_key or os.environ.get("VLLM_API_KEY")
        settings: Json = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "transport": transport,
            # Loading the certificates takes longer than most calls, and plain HTTP needs none.
            "verify": self.base_url.startswith("https:"),
            # The server is named by the user: a proxy in between would only lose the long requests.
            "trust_env": False,
        }
        self._http = httpx.Client(
            **settings,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )
        # A server may close a connection as a call is put on it, after an error or when it was idle. What may run twice
        # is tried again; what may not gets a connection of its own.
        self._http_once = httpx.Client(
            **settings, limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()
        self._http_once.close()

    # ---- what the server is ----

    def health(self, deadline: float = 5.0) -> bool:
        """Whether the server is ready. False also while it loads, or where nobody listens."""
        try:
            return self._send("GET", "/health", deadline=deadline).status_code == 200
        except (ServerUnreachableError, ServerTimeoutError):
            return False

    def wait_until_ready(self, timeout: float, interval: float = 1.0) -> None:
        """Returns as soon as the server is ready.

        Raises:
            ServerUnreachableError: it is not within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                status = self._send("GET", "/health", deadline=min(5.0, max(0.1, end - time.monotonic()))).status_code
                if status == 200:
                    return
                found = f"GET /health answers {status}"
            except (ServerUnreachableError, ServerTimeoutError) as error:
                found = str(error)
            if time.monotonic() + interval > end:
                raise ServerUnreachableError(
                    f"No vLLM server is ready at {self.base_url} after {timeout:g} s ({found}): start one (`trl "
                    "vllm-serve --model MODEL`), check host and port, or raise `vllm_server_timeout`.",
                    method="GET",
                    path="/health",
                )
            time.sleep(interval)

    def version(self) -> str:
        """The server's vLLM version, e.g. `0.32.0`."""
        return str(self._field("GET", "/version", "version"))

    def models(self) -> list[Json]:
        """Rows of `/v1/models`: `id`, `root`, `max_model_len`."""
        return list(self._field("GET", "/v1/models", "data"))

    def world_size(self) -> int:
        """Number of workers: tensor x pipeline x data parallel."""
        return int(self._field("GET", "/get_world_size", "world_size"))

    def server_info(self) -> Json:
        """The server's `vllm_config`."""
        return dict(self._field("GET", "/server_info?config_format=json", "vllm_config"))

    # ---- text ----

    def completions(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        *,
        model: str | None = None,
        deadline: float | None = None,
    ) -> list[Choice]:
        """`len(prompts) * n` completions, prompt-major.

        Args:
            prompts: token ids.
            params: sampling fields of the request. What is left out is filled from the model's generation config.
        """
        told = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return [_text_choice(c) for c in self._choices(prompts, {**told, **params}, model, deadline)]

    def prompt_logps(self, sequences: Sequence[Sequence[int]], *, deadline: float | None = None) -> list[list[float]]:
        """Log-prob of each token of each sequence but its first, by the server's weights."""
        return [scored.token_logps for scored in self.prompt_top_logps(sequences, 0, deadline=deadline)]

    def prompt_top_logps(
        self, sequences: Sequence[Sequence[int]], k: int, *, model: str | None = None, deadline: float | None = None
    ) -> list[TopLogps]:
        """The k likeliest tokens in the place of each token of each sequence but its first, and that token's log-prob.

        Args:
            sequences: token ids, at least two each.
        """
        if not sequences:
            return []
        choices = self._choices(sequences, {**_SCORING, "prompt_logprobs": k}, model, deadline)
        try:
            return [_top_logps(c["prompt_logprobs"], ids, k) for c, ids in zip(choices, sequences)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = "log-probs of prompt tokens are missing. Start the server with `--max-logprobs -1`"
            raise self._error("POST", "/v1/completions", 200, text) from error

    def _choices(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], model: str | None, deadline: float | None
    ) -> list[Json]:
        """The choices of `/v1/completions` in order, as they came."""
        body: Json = {"prompt": [list(p) for p in prompts], **params} | ({} if model is None else {"model": model})
        answer = self._json("POST", "/v1/completions", body, repeat=True, deadline=deadline)
        choices = sorted(answer.get("choices") or (), key=lambda c: c["index"])
        expected = len(prompts) * int(params.get("n", 1))
        if [c["index"] for c in choices] != list(range(expected)):
            raise self._error(
                "POST", "/v1/completions", None, f"{len(choices)} completions came back where {expected} were asked for"
            )
        return choices

    # ---- images ----

    def render(self, messages: Sequence[Json], *, deadline: float | None = None) -> Json:
        """The server's own features of the images in the messages, opaque."""
        body = {"messages": list(messages), "max_tokens": 1}
        return dict(self._json("POST", "/v1/chat/completions/render", body, repeat=True, deadline=deadline))

    def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        features: Json | None = None,
        deadline: float | None = None,
    ) -> list[Choice]:
        """Completions of one prompt given by token ids and image features."""
        body: Json = {"token_ids": list(token_ids), "sampling_params": dict(sampling_params)}
        if features is not None:
            body["features"] = features
        answer = self._json("POST", "/inference/v1/generate", body, repeat=True, deadline=deadline)
        return sorted((_token_choice(c) for c in answer["choices"]), key=lambda c: c.index)

    # ---- weights ----

    def pause(self, mode: str = "keep", deadline: float | None = None) -> None:
        """Holds requests back; `keep` freezes those in flight. What is cached stays."""
        self._json("POST", f"/pause?mode={mode}&clear_cache=false", {}, repeat=True, deadline=deadline)

    def resume(self, deadline: float | None = None) -> None:
        """Lets requests go on."""
        self._json("POST", "/resume", {}, repeat=True, deadline=deadline)

    def init_weight_transfer(self, init_info: Json, deadline: float | None = None) -> None:
        """Has the workers join the trainer's group. Returns when they did, so the trainer joins meanwhile."""
        self._json("POST", "/init_weight_transfer_engine", {"init_info": init_info}, deadline=deadline)

    def start_weight_update(self, deadline: float | None = None) -> None:
        """From here to `finish_weight_update` the server has no weights."""
        self._json("POST", "/start_weight_update", {}, deadline=deadline)

    def update_weights(self, update_info: Json, deadline: float | None = None) -> None:
        """Has the workers receive these tensors. Returns when they are loaded."""
        self._json("POST", "/update_weights", {"update_info": update_info}, deadline=deadline)

    def finish_weight_update(self, version: str | None = None, deadline: float | None = None) -> None:
        """Puts the received weights in place; the old ones where none were received."""
        body = {} if version is None else {"weight_version": version}
        self._json("POST", "/finish_weight_update", body, deadline=deadline)

    def weight_version(self, deadline: float | None = None) -> str | None:
        """The label given to the last finished update; `default` for weights from disk."""
        return self._json("GET", "/weight_info", repeat=True, deadline=deadline).get("weight_version")

    def reset_prefix_cache(self, deadline: float | None = None) -> None:
        """Forgets keys and values computed with earlier weights.

        Raises:
            ServerError: the server says that it did not.
        """
        answer = self._json("POST", "/reset_prefix_cache", {}, repeat=True, deadline=deadline)
        if answer.get("success") is False:
            raise self._error(
                "POST", "/reset_prefix_cache", 200, "the prefix cache was not reset: requests are running"
            )

    def reset_encoder_cache(self, deadline: float | None = None) -> None:
        """Forgets image features computed with earlier weights."""
        self._json("POST", "/reset_encoder_cache", {}, repeat=True, deadline=deadline)

    # ---- mechanism ----

    def _json(
        self, method: str, path: str, body: Json | None = None, *, repeat: bool = False, deadline: float | None = None
    ) -> Json:
        """The answer's JSON object; empty for an answer without a body."""
        end = time.monotonic() + (self.timeout if deadline is None else deadline)
        broken = 0
        while True:
            last = time.monotonic() + _RETRY_PAUSE_S >= end
            try:
                response = self._send(method, path, body, deadline=end - time.monotonic(), once=not repeat)
            except ServerUnreachableError:
                broken += 1
                if not repeat or last or broken == _MAX_BROKEN_CONNECTIONS or not self.health(1.0):
                    raise
            else:
                if response.status_code == 200:
                    return self._object(method, path, response)
                if not repeat or last or response.status_code not in _RETRY_STATUS:
                    raise self._error(method, path, response.status_code, _message_of(response))
            time.sleep(_RETRY_PAUSE_S)

    def _object(self, method: str, path: str, response: httpx.Response) -> Json:
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(
                method, path, response.status_code, f"{response.text[:200]!r}, which is no JSON object: is this vLLM?"
            )
        return answer

    def _field(self, method: str, path: str, name: str) -> Any:
        """One entry of what a repeatable call answers."""
        answer = self._json(method, path, repeat=True)
        if name not in answer:
            raise self._error(method, path, 200, f"{str(answer)[:200]}, without `{name}`: is this vLLM?")
        return answer[name]

    def _send(
        self, method: str, path: str, body: Json | None = None, *, deadline: float, once: bool = False
    ) -> httpx.Response:
        """One request, within `deadline` seconds as a whole; `once` for one that may not run twice."""
        http = self._http_once if once else self._http
        end = time.monotonic() + deadline
        timeout = httpx.Timeout(max(deadline, 0.001), connect=max(0.001, min(deadline, 10.0)))
        request = http.build_request(method, path, json=body, timeout=timeout)
        try:
            response = http.send(request, stream=True)
            # The body has what is left of the time, not all of it again.
            request.extensions["timeout"]["read"] = max(0.001, end - time.monotonic())
            try:
                content = bytearray()
                for piece in response.iter_bytes():
                    content += piece
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("deadline", request=request)
            finally:
                response.close()
        except httpx.TimeoutException as error:
            raise ServerTimeoutError(
                f"{method} {self.base_url}{path}: no answer within {deadline:.3g} s.", method=method, path=path
            ) from error
        except httpx.TransportError as error:
            words = str(error).rstrip(".") or type(error).__name__
            raise ServerUnreachableError(
                f"{method} {self.base_url}{path}: {words}. Is the server running there?",
                method=method,
                path=path,
            ) from error
        return httpx.Response(
            response.status_code, headers={"content-type": "application/json"}, content=bytes(content)
        )

    def _error(self, method: str, path: str, status: int | None, message: str) -> ServerError:
        text = f"{method} {self.base_url}{path}{f' answered {status}' if status else ''}: {message}"
        if hint := _hint(path, status, message):
            text = f"{text.rstrip('.')}. {hint}"
        return ServerError(text, method=method, path=path, status=status, server_message=message)


_DEV_ROUTES = (
    "/get_world_size",
    "/server_info",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_",
)


# What a server says -> what to do about it.
_HINTS = {
    "Weight transfer not configured": """Start the server with `--weight-transfer-config '{"backend": "nccl"}'`.""",
    "EngineCore encountered": "The server's engine died: restart the server.",
    "greater than max allowed": "Start the server with `--max-logprobs -1`.",
    "Refusing to deserialize": "Start the server with VLLM_ALLOW_INSECURE_SERIALIZATION=1 in its environment.",
    "No module named 'ray'": "Install `ray` where the server runs, or a vLLM from 0.27 on.",
}


def _hint(path: str, status: int | None, message: str) -> str:
    """What to do about a failed call, or nothing."""
    if status == 401:
        return "Set `vllm_server_api_key`, or `VLLM_API_KEY` in the environment, to the server's key."
    if status == 404 and path.startswith(_DEV_ROUTES):
        return "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment."
    if status in (403, 404) and path.endswith(("/render", "/generate")):
        return "Start the server with `--enable-scale-out`."
    return next((hint for words, hint in _HINTS.items() if words in message), "")


def _message_of(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return str(body["error"].get("message", body["error"]))
    if isinstance(body, dict):
        return str(body.get("detail", body.get("message", body)))
    return str(body)


def _text_choice(choice: Json) -> Choice:
    """A choice of `/v1/completions`."""
    logprobs, ids = choice.get("logprobs"), choice.get("token_ids")
    logps = [_finite(p) for p in logprobs["token_logprobs"]] if logprobs else []
    if ids is None or (logprobs and len(logps) != len(ids)):
        raise ServerError(
            f"The server returned {'no' if ids is None else len(ids)} token ids with {len(logps)} log-probs."
        )
    return Choice(choice["index"], ids, logps, choice["finish_reason"])


def _top_logps(told: Sequence[Mapping[str, Json]], ids: Sequence[int], k: int) -> TopLogps:
    """From `prompt_logprobs`: in each place the k likeliest tokens, and the actual one where it is none of them."""
    places = [{int(t): (-_finite(e["logprob"]), e["rank"]) for t, e in entry.items()} for entry in told[1:]]
    # Among equal log-probs the actual token has the last rank, unless it is one of the k.
    ranked = [sorted(place.items(), key=lambda item: item[1])[:k] for place in places]
    if any(len(row) < k for row in ranked):
        raise ValueError(f"fewer than {k} log-probs")
    token_logps = [-place[token][0] for place, token in zip(places, ids[1:], strict=True)]
    return TopLogps([[t for t, _ in row] for row in ranked], [[-p for _, (p, _) in row] for row in ranked], token_logps)


def _token_choice(choice: Json) -> Choice:
    """A choice of `/inference/v1/generate`, whose log-prob entries carry the token as text or, later, as a number."""
    logprobs = choice.get("logprobs")
    entries = logprobs["content"] if logprobs else []
    ids = choice["token_ids"]
    for entry, token in zip(entries, ids, strict=False):
        told = entry["token_id"] if "token_id" in entry else int(str(entry["token"]).removeprefix("token_id:"))
        if told != token:
            raise ServerError(f"The server returned the log-prob of token {told} for token {token}.")
    return Choice(choice["index"], ids, [_finite(e["logprob"]) for e in entries], choice["finish_reason"])


def _finite(logprob: float | None) -> float:
    if logprob is None:
        return float("nan")
    return float("-inf") if logprob <= _REMOVED else float(logprob)
