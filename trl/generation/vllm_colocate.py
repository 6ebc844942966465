"""Completions from a vLLM engine inside the trainer's process."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trl.errors import ConfigError, GenerationError, TRLError
from trl.generation.dispatch import EngineGroup
from trl.generation.vllm_params import request_params, within_context
from trl.types import Completion, FinishReason, Prompt, Sampling, Scorer, WeightStream
from trl.weights.in_process import InProcessSync
from trl.weights.source import PolicyWeights
from trl.weights.sync import SyncReport

# Fields that only a server's request has.
_SERVER_ONLY = ("priority", "truncate_prompt_tokens", "vllm_xargs")
_LONGER = "set a larger `vllm_max_model_length`"


@dataclass(frozen=True)
class _Request:
    """What one process asks for: token ids, and the fields of vLLM's `SamplingParams`."""

    token_ids: list[int]
    params: dict[str, Any]


class VLLMColocateEngine:
    """An `Engine` over a `vllm.LLM` of this process.

    Processes that share an engine by tensor parallelism ask for their completions together: every one of them hands all
    their requests to its part of the engine, with the same seed, and keeps its own results.

    Args:
        llm: the engine (`generation.vllm_start.start_llm`), whose weights mean nothing yet.
        group: the processes that share it.
        eos_ids: every id that ends a completion.
        dtype: of its weights, e.g. `bfloat16`.
        sleeps: whether to free its memory between generations.
        structured_outputs: vLLM's constraint on the completions, e.g. `{"regex": …}`.
        on_close: what ends with it, in this order.
    """

    own_weights = True

    def __init__(
        self,
        llm: Any,
        *,
        group: EngineGroup,
        eos_ids: Sequence[int],
        dtype: str,
        sleeps: bool = False,
        structured_outputs: dict[str, Any] | None = None,
        on_close: Sequence[Callable[[], None]] = (),
    ):
        self.llm = llm
        self.policy_version = 0
        self.last_sync: SyncReport | None = None
        self.max_model_len: int = llm.llm_engine.model_config.max_model_len
        self._group, self._eos_ids, self._dtype = group, sorted(eos_ids), dtype
        self._sleeps = sleeps
        self._asleep: set[str] = set()  # which of its memory is gone
        self._names = itertools.count()
        self._pending: set[str] = set()  # requests that vLLM is working on
        self._structured_outputs = structured_outputs
        self._sync = InProcessSync(llm, getattr(torch, dtype))
        # Also where nobody closes it: with the trainer that owns it, or at the end of the process.
        self._end = weakref.finalize(self, _end, on_close)
        self.sleep()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """Yields `(prompt index, its n completions)` as they finish.

        Raises:
            GenerationError: it has no weights, or a prompt leaves no room in its context.
            ConfigError: settings that vLLM does not take.
        """
        # The trainer's generator seeds the draws, so that a run that goes on draws what it would have drawn.
        seed = int(torch.randint(2**31 - 1, ()))
        try:
            requests, copies = self._requests(prompts, sampling)
        except TRLError as error:
            self._group.fail(error)
            raise
        for index, output in self._run(requests, seed):
            yield index, [self._completion(choice) for choice in output.outputs] * copies

    def _requests(self, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[list[_Request], int]:
        """One request a prompt, and how often each of its results counts."""
        self._check_awake()
        params = self._params(sampling)
        # Greedy completions of a prompt are equal, and vLLM refuses to write them several times.
        copies = sampling.n if params["temperature"] == 0.0 else 1
        params["n"] //= copies
        return [
            _Request(p.token_ids, within_context(params, p.token_ids, i, self.max_model_len, _LONGER))
            for i, p in enumerate(prompts)
        ], copies

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """Puts the weights in place, and wakes the engine: first its weights' memory, then that of its cache.

        Raises:
            WeightSyncError: with the phase that failed.
        """
        assert isinstance(weights, PolicyWeights)
        self._abandon()
        self._wake("weights")
        self.last_sync = self._sync.update(weights, version)
        self._wake("kv_cache")
        self.policy_version = version

    def sleep(self) -> bool:
        """Frees the memory of weights and cache, where the engine was started for that."""
        if self._sleeps and not self._asleep:
            self._abandon()
            # Level 2 throws the weights away: new ones come before anything is generated.
            self.llm.sleep(level=2)
            self._sync.version = None
            self._asleep = {"weights", "kv_cache"}
        return self._sleeps

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            if torch.cuda.is_initialized():
                # What training only keeps in reserve is in vLLM's way.
                torch.cuda.empty_cache()
            self.llm.wake_up(tags=[part])
            self._asleep.discard(part)

    @property
    def scorers(self) -> list[Scorer]:
        """The one engine."""
        return [Scorer("vLLM in this process", self._dtype, self.max_model_len, self._score)]

    def close(self) -> None:
        """Ends the engine; a second time does nothing."""
        self._end()

    def _check_awake(self) -> None:
        if self._asleep or self._sync.version is None:
            raise GenerationError(
                f"The engine has no weights ({'it sleeps' if self._asleep else 'none were sent, or not all'}): call "
                "`update_weights` before `generate`."
            )

    def _params(self, sampling: Sampling) -> dict[str, Any]:
        params = request_params(sampling, self._structured_outputs)
        if refused := [name for name in _SERVER_ONLY if name in params]:
            names = ", ".join(f"`{name}`" for name in refused)
            raise ConfigError(f"`generation_kwargs` has {names}, which only a vLLM server takes: leave it out.")
        if not params.get("ignore_eos"):
            params["stop_token_ids"] = sorted({*self._eos_ids, *(params.get("stop_token_ids") or ())})
        return params

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._check_awake()
        params = {"max_tokens": 1, "prompt_logprobs": 0}
        # Nothing of it is drawn: the generator that completions are seeded from stays where it is.
        told = dict(self._run([_Request(list(ids), params) for ids in sequences], seed=0))
        return [
            [entry[token].logprob for entry, token in zip(told[i].prompt_logprobs[1:], ids[1:], strict=True)]
            for i, ids in enumerate(sequences)
        ]

    def _run(self, requests: Sequence[_Request], seed: int) -> Iterator[tuple[int, Any]]:
        """Yields `(index, vLLM's RequestOutput)` of this process's requests as they finish."""
        every, first, seed = self._group.share(list(requests), seed)
        results = self._steps(every, seed)
        if self._group.size > 1:
            # All parts of the engine have to step together, whatever their processes do with the results.
            results = iter(list(results))
        for place, output in results:
            if first <= place < first + len(requests):
                yield place - first, output

    def _steps(self, requests: Sequence[_Request], seed: int) -> Iterator[tuple[int, Any]]:
        self._abandon()
        engine = self.llm.llm_engine
        places = {str(next(self._names)): place for place in range(len(requests))}
        pending = self._pending = set(places)
        state = _Randomness(seed)
        try:
            for name, request in zip(places, requests, strict=True):
                _add(engine, name, request)
            while pending:
                with state:
                    outputs = engine.step()
                for output in outputs:
                    if output.finished and output.request_id in pending:
                        pending.discard(output.request_id)
                        yield places[output.request_id], output
                        if self._pending is not pending:
                            raise GenerationError("These completions were given up: others were asked for meanwhile.")
        finally:
            if self._pending is pending:
                self._abandon()

    def _abandon(self) -> None:
        """Gives up what is still being written, by a generator that somebody holds on to without reading it."""
        if self._pending:
            self.llm.llm_engine.abort_request(list(self._pending))
        self._pending = set()

    def _completion(self, choice: Any) -> Completion:
        flat = choice.logprobs
        # The first entry of each position is the token that was drawn.
        logps = [] if flat is None else [flat.logprobs[i] for i in flat.start_indices]
        if choice.finish_reason not in ("stop", "length"):
            raise GenerationError(f"vLLM ended a completion with {choice.finish_reason!r}.")
        reason: FinishReason = "stop" if choice.finish_reason == "stop" else "length"
        return Completion(list(choice.token_ids), logps, reason, self.policy_version)


def _end(on_close: Sequence[Callable[[], None]]) -> None:
    for end in on_close:
        end()


class _Randomness:
    """Generators of their own for the engine's steps, which go on from one entry to the next."""

    def __init__(self, seed: int):
        self._seed: int | None = seed
        self._cuda = torch.cuda.is_initialized()
        self._inside: list[torch.Tensor] = []
        self._outside: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._outside = self._states()
        if self._seed is not None:
            torch.manual_seed(self._seed)
            self._seed = None
        else:
            self._restore(self._inside)

    def __exit__(self, *exc: object) -> None:
        self._inside = self._states()
        self._restore(self._outside)

    def _states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._cuda else [])]

    def _restore(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._cuda:
            torch.cuda.set_rng_state(states[1])


def _add(engine: Any, name: str, request: _Request) -> None:
    from vllm.exceptions import VLLMValidationError

    try:
        engine.add_request(name, {"prompt_token_ids": request.token_ids}, _sampling_params(request.params))
    except (ValueError, VLLMValidationError) as error:
        raise ConfigError(f"vLLM does not take these sampling settings: {error}") from error


def _sampling_params(fields: dict[str, Any]) -> Any:
    """vLLM's `SamplingParams`: no text where nobody asks for any, one result at the end, log-probs as flat lists."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = dict(fields)
    if "logit_bias" in given:
        # Keys are text where they come from JSON; the bounds are those of a request to a server.
        given["logit_bias"] = {int(token): min(max(bias, -100.0), 100.0) for token, bias in given["logit_bias"].items()}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(
        **given,
        # Stop strings are looked for in the text.
        detokenize=bool(given.get("stop")),
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs="logprobs" in given,
    )
