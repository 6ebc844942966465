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

from trl.errors import ServerError, TRLError, WeightSyncError
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import ServerFacts
from trl.weights.source import PolicyWeights, TensorInfo
from trl.weights.transfer import Transfer

# What a server says whose workers never joined, or forgot that they did: it was restarted.
_NOT_JOINED = "not initialized"


@dataclass
class SyncReport:
    """What an update took.

    Attributes:
        seconds: by phase.
        num_bytes: sent.
        rejoined: whether the server had to be joined anew.
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
            if _NOT_JOINED not in str(error) or report.rejoined:
                raise
            # The server was restarted in between: it knows nobody and has the weights from disk.
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
        return self._client.weight_version() == _label(version)

    def close(self) -> None:
        """Leaves the server."""
        self._transfer.close()

    def _join(self, report: SyncReport) -> None:
        with self._phase("join", report):
            self._transfer.join(self._deadline)
        report.rejoined = True

    def _run(self, weights: PolicyWeights, infos: list[TensorInfo], version: int, report: SyncReport) -> None:
        client, deadline = self._client, self._deadline
        with self._phase("pause", report):
            client.pause("keep", deadline)
        with self._phase("start", report, undo=self._repair):
            client.start_weight_update(deadline)
        with self._phase("update", report, undo=self._repair):
            self._transfer.send(infos, weights, deadline)
        with self._phase("finish", report, undo=self._repair):
            client.finish_weight_update(_label(version) if self._facts.names_weight_versions else None, deadline)
        with self._phase("caches", report, undo=self._resume):
            client.reset_prefix_cache(deadline)
            if self._has_images:
                client.reset_encoder_cache(deadline)
        with self._phase("resume", report):
            client.resume(deadline)
        if self._facts.names_weight_versions:
            with self._phase("verify", report):
                if (told := client.weight_version()) != _label(version):
                    raise ServerError(f"the server names its weights {told!r} after {_label(version)!r} was sent")

    def _repair(self) -> bool:
        """Puts the previous weights back; whether that worked."""
        self.version = None
        try:
            self._begin_empty_update()
            self._client.finish_weight_update(deadline=self._deadline)
            self._client.reset_prefix_cache(self._deadline)
        except TRLError:
            return False
        return self._resume()

    def _begin_empty_update(self) -> None:
        try:
            self._client.start_weight_update(self._deadline)
        except ServerError as error:
            if "already active" not in error.server_message:
                raise

    def _resume(self) -> bool:
        try:
            self._client.resume(self._deadline)
        except TRLError:
            return False
        return True

    @contextmanager
    def _phase(self, name: str, report: SyncReport, undo: Callable[[], bool] | None = None) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except (TRLError, RuntimeError, ValueError, OSError) as error:
            repaired = undo() if undo is not None else name in ("check", "join")
            after = (
                "It serves the previous weights."
                if repaired
                else "It may have no usable weights now: restart it before it is asked for anything."
            )
            notes = " ".join(getattr(error, "__notes__", []))
            raise WeightSyncError(
                f"The weights did not reach {self._client.base_url} (phase {name}, after "
                f"{time.monotonic() - started:.1f} s): {error} {notes} {after}".replace("  ", " "),
                phase=name,
                repaired=repaired,
            ) from error
        report.seconds[name] = report.seconds.get(name, 0.0) + time.monotonic() - started


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
