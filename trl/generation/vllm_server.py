"""Completions from `vllm serve`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trl.errors import ConfigError, GenerationError, TRLError
from trl.generation.vllm_client import Choice, VLLMClient
from trl.generation.vllm_probe import ServerFacts
from trl.types import Completion, FinishReason, Prompt, Sampling, WeightStream
from trl.weights.background import DaemonPool
from trl.weights.source import PolicyWeights
from trl.weights.sync import ServerSync, SyncReport

# Names GenerationConfig and vLLM give the same setting.
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
# Further fields that a request may have. A server ignores those that it does not know, without a word.
_KNOWN = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "vllm_xargs",
    }
)


@dataclass
class Server:
    """One `vllm serve`: how to reach it, what it is, and how its weights are kept current."""

    client: VLLMClient
    facts: ServerFacts
    sync: ServerSync | None = None


class VLLMServerEngine:
    """An `Engine` over one or several servers with the same model.

    A prompt's completions are asked for in one request, so that the server computes the prompt once; many requests are
    in flight, and results are yielded as they finish.

    Args:
        servers: requests are spread over them; a group stays on one.
        request_timeout: seconds for one request.
        max_in_flight: requests at a time, per server.
        structured_outputs: vLLM's constraint on the completions, e.g. `{"regex": …}`.
    """

    own_weights = True

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        request_timeout: float = 600.0,
        max_in_flight: int = 64,
        structured_outputs: dict[str, Any] | None = None,
    ):
        self.servers = list(servers)
        self.policy_version = 0
        self.last_sync: list[SyncReport] = []
        self._weights: PolicyWeights | None = None
        self._request_timeout = request_timeout
        self._structured_outputs = structured_outputs
        self._pool = DaemonPool(max_in_flight * len(self.servers), "trl-generate")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """Yields `(prompt index, its n completions)` as they finish.

        Raises:
            GenerationError: a prompt leaves no room in the server's context.
            ServerError: a server failed; the requests still in flight are abandoned.
        """
        params = request_params(sampling, self._structured_outputs)
        for server in self.servers:
            self._ensure_current(server)
        calls = []
        for index, prompt in enumerate(prompts):
            server = self.servers[index % len(self.servers)]
            limits = self._within_context(index, prompt, params["max_tokens"], server)
            calls.append(partial(self._ask, server, prompt, {**params, **limits}))
        for index, choices in self._pool.run(calls):
            yield index, [self._completion(choice) for choice in choices]

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """Sends the weights to all servers, which generate with them from here on.

        Raises:
            WeightSyncError: with the phase that failed; of several servers, the first that failed, once all are done.
        """
        assert isinstance(weights, PolicyWeights)
        self._weights = weights
        receivers = [server for server in self.servers if server.sync is not None]
        pool = DaemonPool(len(receivers), "trl-sync")
        outcomes = dict(pool.run([partial(_try_to_send, server, weights, version) for server in receivers]))
        pool.close()
        for outcome in outcomes.values():
            if isinstance(outcome, TRLError):
                raise outcome
        self.last_sync = [report for _, report in sorted(outcomes.items()) if isinstance(report, SyncReport)]
        self.policy_version = version

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """For each server, the log-prob of each token of each sequence but its first."""
        return [server.client.prompt_logps(sequences) for server in self.servers]

    def close(self) -> None:
        """Ends requests and connections; the servers run on."""
        self._pool.close()
        for server in self.servers:
            if server.sync is not None:
                server.sync.close()
            server.client.close()

    def _ensure_current(self, server: Server) -> None:
        """Sends the weights again to a server that was restarted since it got them."""
        if server.sync is None or self._weights is None or server.sync.serves(self.policy_version):
            return
        _send(server, self._weights, self.policy_version)

    def _ask(self, server: Server, prompt: Prompt, params: dict[str, Any]) -> list[Choice]:
        n = params["n"]
        if params["temperature"] == 0.0 and n > 1:
            # vLLM refuses several greedy completions of one prompt: they are equal.
            one = self._ask(server, prompt, {**params, "n": 1})
            return one * n
        choices = server.client.completions(
            [prompt.token_ids], params, model=server.facts.model, deadline=self._request_timeout
        )
        if any(choice.finish_reason == "abort" for choice in choices):
            raise GenerationError(
                f"{server.client.base_url} aborted a request: somebody else paused it or put it to sleep. A server in "
                "training must be left to the trainer."
            )
        return choices

    def _within_context(self, index: int, prompt: Prompt, max_tokens: int, server: Server) -> dict[str, int]:
        room = server.facts.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise GenerationError(
                f"Prompt {index} has {len(prompt.token_ids)} tokens, and the server's context is "
                f"{server.facts.max_model_len}: restart it with a larger `--max-model-len`, or drop the row."
            )
        return {"max_tokens": min(max_tokens, room)}

    def _completion(self, choice: Choice) -> Completion:
        reason: FinishReason = "stop" if choice.finish_reason == "stop" else "length"
        return Completion(choice.token_ids, choice.logps, reason, self.policy_version)


def _send(server: Server, weights: PolicyWeights, version: int) -> SyncReport:
    """One server gets the weights in its own dtype."""
    assert server.sync is not None
    dtype = getattr(torch, server.facts.dtype) if server.facts.dtype else None
    return server.sync.update(weights.in_dtype(dtype), version)


def _try_to_send(server: Server, weights: PolicyWeights, version: int) -> SyncReport | TRLError:
    """The report or the error: while one server fails, the others are not left in the middle of an update."""
    try:
        return _send(server, weights, version)
    except TRLError as error:
        return error


def request_params(sampling: Sampling, structured_outputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every sampling field of a request: what is left out, a server fills from the model's generation config.

    Raises:
        ConfigError: settings that a request cannot carry.
    """
    params: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.with_logps:
        params["logprobs"] = 0
    for given, value in sampling.extra.items():
        name = _RENAMED.get(given, given)
        if name == "do_sample":
            params.update({} if value else {"temperature": 0.0})
        elif name in _KNOWN:
            params[name] = value
        else:
            raise ConfigError(
                f"`generation_kwargs` has `{given}`, which a request to a vLLM server cannot carry or the trainer sets "
                f"itself: leave it out, or use one of {', '.join(sorted(_KNOWN))}."
            )
    if structured_outputs is not None:
        params["structured_outputs"] = structured_outputs
    return params
