"""Completions from `vllm serve`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trl.errors import GenerationError, TRLError
from trl.generation.vllm_client import Choice, VLLMClient
from trl.generation.vllm_params import request_params, within_context
from trl.generation.vllm_probe import ServerFacts
from trl.types import Completion, FinishReason, Prompt, Sampling, Scorer, WeightStream
from trl.weights.background import DaemonPool
from trl.weights.source import PolicyWeights
from trl.weights.sync import ServerSync, SyncReport

_LONGER = "restart the server with a larger `--max-model-len`"


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
            fitting = within_context(params, prompt.token_ids, index, server.facts.max_model_len, _LONGER)
            calls.append(partial(self._ask, server, prompt, fitting))
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

    @property
    def scorers(self) -> list[Scorer]:
        """One per server."""
        return [
            Scorer(s.client.base_url, s.facts.dtype, s.facts.max_model_len, s.client.prompt_logps) for s in self.servers
        ]

    def sleep(self) -> bool:
        """Nothing to free here: the server's memory is its own."""
        return False

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
