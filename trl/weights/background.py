"""Calls in daemon threads: neither a peer that is gone nor a stuck collective holds the process at its end.

The executors of the standard library are no choice here: at exit they wait for their threads, however long those hang.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from trl.errors import ServerTimeoutError

T = TypeVar("T")

# How long to wait for a server's words after a broadcast to it broke: they may say more than "connection closed".
_WORDS_S = 2.0
# How long a process that ends waits for threads inside a collective library.
_EXIT_S = 2.0

_in_library: set[threading.Thread] = set()


def start_in_library(function: Callable[[], None], name: str) -> threading.Thread:
    """Runs what calls into a collective library, in a daemon thread.

    One that came back from the library while the interpreter is being torn down would abort the process. A stuck
    broadcast ends by its own deadline, mostly about when its failure is told, so that a short wait at exit is enough;
    what is stuck for longer does not come back in time to do harm.
    """

    def run() -> None:
        try:
            function()
        finally:
            _in_library.discard(threading.current_thread())

    thread = threading.Thread(target=run, daemon=True, name=name)
    _in_library.add(thread)
    thread.start()
    return thread


@atexit.register
def _wait_for_library() -> None:
    end = time.monotonic() + _EXIT_S
    for thread in list(_in_library):
        thread.join(max(0.0, end - time.monotonic()))


@dataclass
class _Outcome:
    place: int
    value: Any = None
    error: BaseException | None = None


@dataclass
class _Batch(Generic[T]):
    """Calls that belong together, and where their outcomes go."""

    calls: Sequence[Callable[[], T]]
    outcomes: "queue.SimpleQueue[_Outcome]" = field(default_factory=queue.SimpleQueue)
    given_up: bool = False

    def run(self, place: int) -> None:
        if not self.given_up:
            self.outcomes.put(_outcome(place, self.calls[place]))


class DaemonPool:
    """Up to `size` calls at a time, begun in the order given.

    Args:
        size: most threads; they are started as they are needed.
        name: of the threads.
    """

    def __init__(self, size: int, name: str):
        self._size, self._name = size, name
        self._tasks: queue.SimpleQueue[tuple[_Batch, int] | None] = queue.SimpleQueue()
        self._threads = 0

    def run(self, calls: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
        """Yields `(place of the call, its result)` as calls end.

        When one raises, or the caller stops asking, the calls that have not begun are dropped.
        """
        batch = _Batch(calls)
        for place in range(len(calls)):
            self._tasks.put((batch, place))
        while self._threads < min(self._size, len(calls)):
            self._threads += 1
            threading.Thread(target=self._work, daemon=True, name=self._name).start()
        try:
            for _ in calls:
                outcome = batch.outcomes.get()
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.place, outcome.value
        finally:
            batch.given_up = True

    def close(self) -> None:
        """Ends the threads that are idle; the others end with their call."""
        for _ in range(self._threads):
            self._tasks.put(None)
        self._threads = 0

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            batch, place = task
            batch.run(place)


def together(
    call: Callable[[], Any], work: Callable[[], Any], deadline: float, give_up: Callable[[], None] | None = None
) -> tuple[Any, Any]:
    """Results of both, which need each other to end.

    Args:
        call: the request to a server.
        work: this process's part.
        give_up: called when the work has failed, so that the server stops waiting for it and can answer.

    Raises:
        ServerTimeoutError: not both have ended within `deadline` seconds.
        Exception: whatever came first, with a note of what the other raised.
    """
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
    threading.Thread(target=lambda: outcomes.put(_outcome(0, call)), daemon=True, name="trl-weights-call").start()
    start_in_library(lambda: outcomes.put(_outcome(1, work)), "trl-weights")
    end, found = time.monotonic() + deadline, dict[int, _Outcome]()
    while len(found) < 2:
        try:
            outcome = outcomes.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[outcome.place] = outcome
        if outcome.error is not None:
            if outcome.place == 0:
                break
            if give_up is not None:
                give_up()
            end = min(end, time.monotonic() + _WORDS_S)
    failures = [outcome for outcome in found.values() if outcome.error is not None]
    for first in failures[:1]:
        assert first.error is not None
        for other in failures[1:]:
            first.error.add_note(f"{'This process' if other.place else 'The server'}: {other.error}")
        raise first.error
    if len(found) < 2:
        raise ServerTimeoutError(
            f"{'This process' if 0 in found else 'The server'} did not end within {deadline:.3g} s"
        )
    return found[0].value, found[1].value


def _outcome(place: int, function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(place, function())
    except BaseException as error:  # carried to the thread that waits
        return _Outcome(place, error=error)
