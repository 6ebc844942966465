"""A teacher behind `vllm serve`: its distributions at the tokens that the student wrote.

Shapes: T completion tokens of all sequences, K likeliest tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trl.errors import ConfigError, GenerationError, ServerError
from trl.generation.vllm_client import TopLogps, VLLMClient
from trl.generation.vllm_probe import ServerFacts, probe
from trl.weights.background import DaemonPool

# The log of a sum of probabilities is 0 at most, but for rounding; logits exceed it by whole nats.
_ROUNDING = 0.1


class TeacherLogps(NamedTuple):
    """What a teacher says at each completion token, at temperature 1 and given all tokens before it.

    Attributes:
        ids: `[T, K]` its likeliest tokens, the likeliest first.
        logps: `[T, K]` their log-probs, float32.
        token_logps: `[T]` log-prob of the completion's own token, float32.
    """

    ids: Tensor
    logps: Tensor
    token_logps: Tensor


class ServerTeacher:
    """A model on one server that scores what another one wrote. `connect_teacher` makes one that is known to work.

    Args:
        client: of the server, which is closed with the teacher.
        facts: of the server.
        top_k: K, likeliest tokens asked for in each place.
        vocab_size: ids for which the student has a logit; None does not look.
        request_timeout: seconds for one request, which is one sequence.
        max_in_flight: requests at a time.
    """

    def __init__(
        self,
        client: VLLMClient,
        facts: ServerFacts,
        *,
        top_k: int,
        vocab_size: int | None = None,
        request_timeout: float = 600.0,
        max_in_flight: int = 32,
    ):
        self.client = client
        self.facts = facts
        self.top_k = top_k
        self._vocab_size = vocab_size
        self._request_timeout = request_timeout
        self._pool = DaemonPool(max_in_flight, "trl-teacher")

    def distributions(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TeacherLogps:
        """`[T, K]` ids, `[T, K]` log-probs and `[T]` log-probs of the tokens themselves, on the CPU.

        The completions are in the order given. Equal sequences are asked for once.

        Args:
            sequences: token ids of prompt and completion of each.

        Raises:
            GenerationError: a sequence that the server cannot score, before anything is asked; or an answer that is of
                no use to the student.
            ServerError: the server failed; what has not been asked for is not any more.
        """
        wholes = [(*prompt, *completion) for prompt, completion in sequences]
        lengths = [len(completion) for _, completion in sequences]
        for index, (whole, length) in enumerate(zip(wholes, lengths)):
            self._check_length(index, len(whole), length)
        different = list(dict.fromkeys(whole for whole, length in zip(wholes, lengths) if length))
        answers = dict(self._pool.run([partial(self._ask, whole) for whole in different]))
        told = {whole: answers[place] for place, whole in enumerate(different)}
        parts = [_last(told[whole], length) for whole, length in zip(wholes, lengths) if length]
        if not parts:
            return TeacherLogps(
                torch.empty(0, self.top_k, dtype=torch.long), torch.empty(0, self.top_k), torch.empty(0)
            )
        return self._checked(TeacherLogps(*map(torch.cat, zip(*parts))))

    def close(self) -> None:
        """Ends requests and connections; the server runs on."""
        self._pool.close()
        self.client.close()

    def _ask(self, token_ids: Sequence[int]) -> TopLogps:
        (scored,) = self.client.prompt_top_logps(
            [token_ids], self.top_k, model=self.facts.model, deadline=self._request_timeout
        )
        return scored

    def _check_length(self, index: int, whole: int, completion: int) -> None:
        """Raises `GenerationError` for a sequence without room for the one token that vLLM has to generate."""
        longest = self.facts.max_model_len - 1
        if completion and whole > longest:
            raise GenerationError(
                f"Sequence {index} has {whole} tokens with its completion, and the teacher {self.client.base_url} "
                f"scores {longest} at most: restart it with a larger `--max-model-len`, or lower "
                "`max_completion_length`."
            )
        if completion and whole == completion:
            raise GenerationError(
                f"Sequence {index} has no prompt, and a model gives no log-prob to the first token: drop the row."
            )

    def _checked(self, logps: TeacherLogps) -> TeacherLogps:
        """The same, if a loss can be made of it."""
        if logps.logps.isnan().any() or logps.token_logps.isnan().any():
            raise GenerationError(
                f"The teacher {self.client.base_url} returned log-probs that are not numbers: its computation "
                "overflows, try another `--dtype`."
            )
        beyond = int(logps.ids.max()) if logps.ids.numel() else 0
        if self._vocab_size is not None and beyond >= self._vocab_size:
            raise GenerationError(
                f"The teacher {self.client.base_url} finds token {beyond} likely, and the student has "
                f"{self._vocab_size} tokens: choose a teacher of the same family, or lower `loss_top_k`."
            )
        return logps


def connect_teacher(
    url: str,
    *,
    top_k: int,
    api_key: str | None = None,
    timeout: float = 240.0,
    request_timeout: float = 600.0,
    vocab_size: int | None = None,
    student_tokens: int | None = None,
    allow_unsupported_version: bool = False,
) -> ServerTeacher:
    """The teacher at `url`, which was waited for, asked what it is, and tried.

    Args:
        top_k: likeliest tokens that the loss compares (`loss_top_k`).
        api_key: `VLLM_API_KEY` of the environment when not given.
        timeout: seconds to wait for the server.
        request_timeout: seconds for one request.
        vocab_size: ids for which the student has a logit; None does not look.
        student_tokens: ids that the student's tokenizer has, all of which the teacher has to know; `vocab_size` when
            not given. A model may have more, which pad its vocabulary.

    Raises:
        ServerUnreachableError: nobody answers in time.
        ServerVersionError: outside the supported range.
        ConfigError: it cannot be a teacher as it was started; with the flag to start it with.
        ServerError: it failed.
    """
    client = teacher_client(url, api_key=api_key, request_timeout=request_timeout)
    try:
        client.wait_until_ready(timeout)
        facts = probe(client, allow_unsupported_version=allow_unsupported_version)
        check_teacher(client, facts, top_k, vocab_size if student_tokens is None else student_tokens)
    except BaseException:
        client.close()
        raise
    return ServerTeacher(client, facts, top_k=top_k, vocab_size=vocab_size, request_timeout=request_timeout)


def teacher_client(url: str, *, api_key: str | None, request_timeout: float) -> VLLMClient:
    """A client of the server at `teacher_model_server_url`; nothing is asked yet."""
    check_teacher_url(url)
    return VLLMClient(url, api_key=api_key, timeout=request_timeout)


def check_teacher_url(url: str) -> None:
    """Raises `ConfigError` for a `teacher_model_server_url` that is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"`teacher_model_server_url` is no URL (got {url!r}): begin it with http:// or https://.")


def check_teacher(client: VLLMClient, facts: ServerFacts, top_k: int, student_tokens: int | None = None) -> None:
    """Raises `ConfigError` for a server that cannot be a teacher. What it says of itself is tried all the same.

    Args:
        top_k: likeliest tokens that the loss compares (`loss_top_k`).
        student_tokens: ids that the teacher has to know; None does not look.
    """
    if facts.max_logprobs is not None and -1 != facts.max_logprobs < top_k:
        raise ConfigError(_capped(client, f"gives at most {facts.max_logprobs} log-probs per token", top_k))
    last = 0 if student_tokens is None else student_tokens - 1
    try:
        (scored,) = client.prompt_top_logps([[last, last]], top_k, model=facts.model)
    except ServerError as error:
        if error.status == 400 and "greater than max allowed" in error.server_message:
            raise ConfigError(_capped(client, f"says {error.server_message!r}", top_k)) from error
        if error.status == 400 and "out of vocabulary" in error.server_message:
            raise ConfigError(
                f"The teacher {client.base_url} has fewer tokens than the student's {student_tokens}: serve a teacher "
                "of the same family."
            ) from error
        raise
    told_logits = facts.logprobs_mode is not None and facts.logprobs_mode.endswith("logits")
    if told_logits or torch.tensor(scored.top_logps).logsumexp(1) > _ROUNDING:
        raise ConfigError(
            f"The teacher {client.base_url} returns logits in place of log-probs: start it with "
            "`--logprobs-mode processed_logprobs`."
        )


def _capped(client: VLLMClient, found: str, top_k: int) -> str:
    return (
        f"The teacher {client.base_url} {found}, and `loss_top_k` is {top_k}: start it with "
        "`vllm serve TEACHER … --max-logprobs -1`."
    )


def _last(scored: TopLogps, length: int) -> TeacherLogps:
    """What is said of the last `length` tokens, as tensors."""
    return TeacherLogps(
        torch.tensor(scored.top_ids[-length:], dtype=torch.long),
        torch.tensor(scored.top_logps[-length:], dtype=torch.float32),
        torch.tensor(scored.token_logps[-length:], dtype=torch.float32),
    )
