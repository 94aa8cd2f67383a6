"""`WorkQueue`: a stream with a thread of its own, for work that waits for others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import RunError
from weft.run.launch.failures import PeerLostError
from weft.run.streams import Completion, Reports, Value

JOIN_TIMEOUT_S = 5.0


class Promise(Reports):
    """The end of work that another thread does.

    The gate is a lock, since an instruction of a few microseconds has several promises. A `threading.Event`
    costs more: it is made of a condition, a queue and a second lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._error: RunError | None = None

    def end(self, times: tuple[int, int]) -> None:
        super().end(times)
        self._gate.release()

    def fail(self, error: RunError) -> None:
        self._error = error
        self._gate.release()

    def wait(self) -> None:
        with self._gate:  # it stays open for later callers
            pass
        if self._error is not None:
            raise self._error


@dataclass(slots=True)
class QueuedWork:
    """One job of a queue's thread, done once all values that it reads are there. It never changes."""

    label: str
    work: Callable[[], None]
    reads: Sequence[Value[Any]]
    promise: Promise = field(default_factory=Promise)
    posted_ns: int = field(default_factory=time.monotonic_ns)


class WorkQueue:
    """A thread that does its jobs in order; it starts with the first job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._free_ns = 0
        self._failure: RunError | None = None
        self._jobs: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"weft-{self.name}", daemon=True)
            self._thread.start()
        job = QueuedWork(label, work, reads)
        self._jobs.put(job)
        return job.promise

    def close(self) -> None:
        """End the thread after its remaining jobs; leave it behind if its peer never answers."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        while self._finish_next():
            pass

    def _finish_next(self) -> bool:
        # The job's tensors are freed with this call, not only when the next job comes.
        job = self._jobs.get()
        if job is None:
            return False
        if self._failure is None:
            self._failure = self._finish(job)
        if self._failure is not None:
            # The stream is in order: later jobs may never get their data after a failed one.
            job.promise.fail(self._failure)
        return True

    def _finish(self, job: QueuedWork) -> RunError | None:
        try:
            # The work may have begun before this thread woke up.
            start_ns = max(job.posted_ns, self._free_ns)
            for value in job.reads:
                value.completion.wait()
                if value.completion.times is not None:
                    start_ns = max(start_ns, value.completion.times[1])
            job.work()
            self._free_ns = time.monotonic_ns()
            job.promise.end((start_ns, self._free_ns))
        except RunError as error:
            return error
        except Exception as error:
            return labelled(error, job.label, self.name)
        return None


def labelled(error: Exception, label: str, name: str) -> RunError:
    """Return the error of an instruction that failed on the stream of that name."""
    # torch reports every failed transfer as a plain RuntimeError.
    lost = isinstance(error, OSError) or type(error) is RuntimeError
    return (PeerLostError if lost else RunError)(f"{label}: {name} failed: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
