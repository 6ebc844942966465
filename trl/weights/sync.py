"""One weight update of one server, as a sequence of named phases, each with a deadline.

    check -> (join) -> pause -> start -> update -> finish -> caches -> resume -> verify

Between start and finish the server has no weights, and a request in that window kills it: hence the pause. Whatever
fails after the start is repaired by starting and finishing an update with nothing in between, which puts the previous
weights back; where that fails too, the error says that the server must be restarted.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from trl.errors import ServerError, TRLError, WeightSyncError
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import ServerFacts
from trl.weights.source import PolicyWeights, TensorInfo
from trl.weights.transfer import Transfer

# What a server says whose workers never joined, or forgot that they did: it was restarted.
_NOT_JOINED = "not initialized"
# What it says to a start where an update is open.
_OPEN = "already active"
_FAILURES = (TRLError, RuntimeError, ValueError, OSError)
# Seconds that putting things right may take beyond the deadline of the phase that failed.
_GRACE_S = 1.5

# How a repair ended: with the previous weights in place, with some weights in place, or not at all.
_Ending = Literal["previous", "some", "none"]
_BEFORE = "It serves the weights it had before."
_EMPTY = "It may have no usable weights now: restart it before it is asked for anything."
_PAUSED = "but may be paused: `POST /resume` lets it go on."
# Phase -> what holds after it failed, by how the repair ended.
_AFTERWARDS: dict[str, dict[_Ending, str]] = {
    "check": {"previous": _BEFORE},
    "join": {"previous": _BEFORE},
    "pause": {"previous": _BEFORE, "none": f"It has the weights it had before, {_PAUSED}"},
    "start": {"previous": _BEFORE, "none": _EMPTY},
    "update": {
        "previous": _BEFORE,
        "some": "It answers again, but some of its weights may be the new ones: send them all again, or restart it.",
        "none": _EMPTY,
    },
    "finish": {
        "some": "It answers again, with the weights it had before or with the new ones: send them again.",
        "none": _EMPTY,
    },
    "caches": {"none": "It has the new weights, but may answer from what it cached with the old ones: restart it."},
    "resume": {"none": f"It has the new weights, {_PAUSED}"},
    "verify": {"none": "Which weights it has is not known: restart it, and leave it to one trainer."},
}


@dataclass
class SyncReport:
    """What an update took.

    Attributes:
        seconds: by phase.
        num_bytes: sent.
        rejoined: whether the server had forgotten that it was joined: it was restarted.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    rejoined: bool = False


class ServerSync:
    """Keeps one server's weights those of the policy.

    Args:
        client, facts: the server.
        transfer: how the bytes go.
        deadline: seconds for each phase.
        expected: shapes by name that the server's checkpoint has, where they can be read; empty is no check.
        has_images: also forget image features.
    """

    def __init__(
        self,
        client: VLLMClient,
        facts: ServerFacts,
        transfer: Transfer,
        *,
        deadline: float,
        expected: dict[str, tuple[int, ...]] | None = None,
        has_images: bool = False,
    ):
        self._client, self._facts, self._transfer = client, facts, transfer
        self._deadline = deadline
        self._expected = expected or {}
        self._has_images = has_images
        self.version: int | None = None

    def update(self, weights: PolicyWeights, version: int) -> SyncReport:
        """Sends all weights. On return the server generates with them, and with nothing cached from before.

        Raises:
            WeightSyncError: with the phase, and whether the server serves the previous weights again.
        """
        report = SyncReport()
        infos = weights.metadata()
        report.num_bytes = sum(i.num_bytes for i in infos)
        with self._phase("check", report):
            check_shapes(infos, self._expected)
        if not self._transfer.joined:
            self._join(report)
        try:
            self._run(weights, infos, version, report)
        except WeightSyncError as error:
            if _NOT_JOINED not in str(error):
                raise
            # It knows nobody and has the weights from disk, or those of somebody else.
            self.version, report.rejoined = None, True
            self._join(report)
            self._run(weights, infos, version, report)
        self.version = version
        return report

    def serves(self, version: int) -> bool:
        """Whether the server still has the weights of this version; False after it was restarted.

        Servers that cannot name their version are taken at their last word.
        """
        if self.version != version:
            return False
        if not self._facts.names_weight_versions:
            return True
        return self._client.weight_version(self._deadline) == _label(version)

    def close(self) -> None:
        """Leaves the server."""
        self._transfer.close()

    def _join(self, report: SyncReport) -> None:
        with self._phase("join", report):
            self._transfer.join(self._deadline)

    def _run(self, weights: PolicyWeights, infos: list[TensorInfo], version: int, report: SyncReport) -> None:
        client, deadline = self._client, self._deadline
        label = _label(version) if self._facts.names_weight_versions else None
        with self._phase("pause", report, undo=self._resume):
            client.pause("keep", deadline)
        before, self.version = self.version, None
        try:
            with self._phase("start", report, undo=self._put_back):
                self._start()
            with self._phase("update", report, undo=lambda end: self._put_back(end, sent=True)):
                self._transfer.send(infos, weights, deadline)
        except WeightSyncError as error:
            self.version = before if error.repaired else None
            raise
        with self._phase("finish", report, undo=lambda end: self._put_back(end, sent=True, finished=True)):
            client.finish_weight_update(label, deadline)
        with self._phase("caches", report, undo=self._resume_with_new_weights):
            client.reset_prefix_cache(deadline)
            if self._has_images:
                client.reset_encoder_cache(deadline)
        with self._phase("resume", report):
            client.resume(deadline)
        if label is not None:
            with self._phase("verify", report):
                if (told := client.weight_version(deadline)) != label:
                    raise ServerError(f"the server names its weights {told!r} after {label!r} was sent")

    def _start(self) -> None:
        """Starts an update; one that somebody left open, a trainer that was killed for one, is ended first."""
        try:
            self._client.start_weight_update(self._deadline)
        except ServerError as error:
            if _OPEN not in error.server_message:
                raise
            self._client.finish_weight_update(deadline=self._deadline)
            self._client.start_weight_update(self._deadline)

    def _put_back(self, end: float, *, sent: bool = False, finished: bool = False) -> _Ending:
        """Has the server serve again by `end`, with the weights it had: an update with nothing in it puts them back.

        The finish is tried also where the start fails: perhaps only its answer was lost.

        Args:
            sent: tensors may have arrived; an update that is still open then puts them in place.
            finished: they may be in place already.
        """
        client, was_open = self._client, False

        def start() -> None:
            nonlocal was_open
            try:
                client.start_weight_update(_left(end) / 2)
            except ServerError as error:
                was_open = _OPEN in error.server_message
                if not was_open:
                    raise

        started = _worked(start)
        ended = _worked(lambda: client.finish_weight_update(deadline=_left(end)))
        if not (started and ended and _worked(lambda: client.reset_prefix_cache(_left(end)))):
            return "none"
        if self._resume(end) == "none":
            return "none"
        return "some" if finished or (sent and was_open) else "previous"

    def _resume(self, end: float) -> _Ending:
        return "previous" if _worked(lambda: self._client.resume(_left(end))) else "none"

    def _resume_with_new_weights(self, end: float) -> _Ending:
        self._resume(end)
        return "none"

    @contextmanager
    def _phase(self, name: str, report: SyncReport, undo: Callable[[float], _Ending] | None = None) -> Iterator[None]:
        """Times what is done in it, and makes a failure a `WeightSyncError` after `undo` has tried to put things right.

        Args:
            undo: takes the time by which it has to end.
        """
        started = time.monotonic()
        try:
            yield
        except _FAILURES as error:
            took = time.monotonic() - started
            end = started + max(took + _GRACE_S, self._deadline)
            untouched = name in ("check", "join")
            ending = undo(end) if undo is not None else "previous" if untouched else "none"
            raise self._failure(name, error, took, ending) from error
        except BaseException:
            # Whatever it is, an interrupt among others: the server is not left without weights.
            if undo is not None:
                undo(time.monotonic() + _GRACE_S)
            raise
        report.seconds[name] = report.seconds.get(name, 0.0) + time.monotonic() - started

    def _failure(self, phase: str, error: BaseException, took: float, ending: _Ending) -> WeightSyncError:
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", []))
        words = str(error) if str(error).endswith((".", "?")) else f"{error}."
        return WeightSyncError(
            f"The weights did not reach {self._client.base_url} (phase {phase}, after {took:.1f} s): {words}{notes} "
            f"{_AFTERWARDS[phase][ending]}",
            phase=phase,
            repaired=ending == "previous",
        )


def _worked(call: Callable[[], None]) -> bool:
    try:
        call()
    except TRLError:
        return False
    return True


def _left(end: float) -> float:
    return max(0.1, end - time.monotonic())


def check_shapes(infos: list[TensorInfo], expected: dict[str, tuple[int, ...]]) -> None:
    """Compares what is about to be sent with what the server's checkpoint holds.

    Raises:
        ValueError: a tensor with another shape, or no tensor in common.
    """
    if not expected:
        return
    common = [i for i in infos if i.name in expected]
    if not common:
        raise ValueError(
            f"no tensor of the policy is in the server's checkpoint (the policy's first is {infos[0].name}, the "
            f"checkpoint's {next(iter(expected))}): it serves another model."
        )
    for info in common:
        if tuple(expected[info.name]) != info.shape:
            raise ValueError(
                f"{info.name} has shape {list(info.shape)} here and {list(expected[info.name])} on the server: it "
                "serves another model."
            )


def _label(version: int) -> str:
    return f"step-{version}"
