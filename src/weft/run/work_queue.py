"""What a rank has not to wait for: results on their way, and threads that bring them about in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weft.errors import RunError
from weft.run.failures import PeerLostError

JOIN_TIMEOUT_S = 5.0

# start and end of a transfer, in nanoseconds of `time.monotonic_ns`.
Stamp = Callable[[int, int], None]


def unstamped(start_ns: int, end_ns: int) -> None:
    """The stamp of a transfer whose times nobody keeps."""


def nothing_to_wait_for() -> None:
    """What is read is there."""


class Handle(Protocol):
    """A result on its way."""

    def wait(self) -> torch.Tensor:
        """Block until the result is there.

        Raises:
            RunError: what went wrong, with the instruction and the peer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A result that is there."""

    value: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.value


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(slots=True)
class Promise:
    """A result that another thread brings about. `label` names the instruction, for errors.

    The gate is a lock and no `threading.Event`: there are several promises to an instruction of a few
    microseconds, and an event is made of a condition, a queue and a second lock.
    """

    label: str
    _gate: threading.Lock = field(default_factory=_closed_gate)
    _value: torch.Tensor | None = None
    _error: RunError | None = None

    @property
    def kept(self) -> bool:
        """Whether nobody needs to wait any more."""
        return not self._gate.locked()

    def resolve(self, value: torch.Tensor) -> None:
        self._value = value
        self._gate.release()

    def fail(self, error: RunError) -> None:
        self._error = error
        self._gate.release()

    def wait(self) -> torch.Tensor:
        with self._gate:  # whoever comes later finds it open, too
            pass
        if self._error is not None:
            raise self._error
        assert self._value is not None, "a promise is resolved with a value"
        return self._value


@dataclass(slots=True)
class Job:
    """What a queue's thread does: `run` blocks until the result is there. Nobody changes it."""

    promise: Promise
    run: Callable[[], torch.Tensor]
    stamp: Stamp
    posted_ns: int = field(default_factory=time.monotonic_ns)


class WorkQueue:
    """A thread that finishes jobs in the order in which they were given; it is one stream of the Program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._free_ns = 0
        self._last: Promise | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"weft-{name}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all jobs given so far are done; asked by the thread that gives them."""
        return self._last is None or self._last.kept

    def put(self, job: Job) -> Promise:
        self._last = job.promise
        self._jobs.put(job)
        return job.promise

    def close(self) -> None:
        """End the thread after the jobs it still has, or leave it behind when its peer never answers."""
        self._jobs.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        failure: RunError | None = None
        while (job := self._jobs.get()) is not None:
            if failure is None:
                failure = self._finish(job)
            else:
                # The stream is in order: nothing behind a failed job can be trusted to arrive.
                job.promise.fail(failure)

    def _finish(self, job: Job) -> RunError | None:
        # The transfer may have begun before this thread was woken up.
        start_ns = max(job.posted_ns, self._free_ns)
        try:
            value = job.run()
            self._free_ns = time.monotonic_ns()
            job.stamp(start_ns, self._free_ns)
        except Exception as error:
            failure = transfer_error(job.promise.label, self.name, error)
            job.promise.fail(failure)
            return failure
        job.promise.resolve(value)
        return None


def transfer_error(label: str, name: str, error: Exception) -> RunError:
    """What readers are told of a transfer that failed."""
    # torch reports every failed transfer as a plain RuntimeError.
    lost = isinstance(error, OSError) or type(error) is RuntimeError
    return (PeerLostError if lost else RunError)(f"{label}: {name} failed: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
