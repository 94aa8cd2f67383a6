"""Messages between ranks: one waiter thread per (peer, direction, kind), first in, first out.

gloo tells that a message has arrived only to a thread that waits for it: `Work.is_completed()` stays False
until then, and a wait with a timeout destroys the connection. So a thread waits for each queue, stamps the
time of arrival and wakes whoever needs the tensor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from weft.errors import RunError
from weft.run.failures import PeerLostError

JOIN_TIMEOUT_S = 5.0

# What messages carry.
ACTIVATION, OUTPUT_GRADIENT = "activation", "output_gradient"

# start and end of the transfer, in nanoseconds of `time.monotonic_ns`.
Stamp = Callable[[int, int], None]


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(slots=True)
class Handle:
    """A result on its way. `label` names the instruction, for errors.

    The gate is a lock and no `threading.Event`: there are several handles to an instruction of a few
    microseconds, and an event is made of a condition, a queue and a second lock.
    """

    label: str
    _gate: threading.Lock = field(default_factory=_closed_gate)
    _value: torch.Tensor | None = None
    _error: RunError | None = None

    def resolve(self, value: torch.Tensor) -> None:
        self._value = value
        self._gate.release()

    def fail(self, error: RunError) -> None:
        self._error = error
        self._gate.release()

    def wait(self) -> torch.Tensor:
        """Block until the result is there.

        Raises:
            RunError: what went wrong, with the instruction and the peer.
        """
        with self._gate:  # whoever comes later finds it open, too
            pass
        if self._error is not None:
            raise self._error
        assert self._value is not None, "a handle is resolved with a value"
        return self._value


@dataclass(slots=True)
class Job:
    """What a queue's thread does: `run` blocks until the result is there. Nobody changes it."""

    handle: Handle
    run: Callable[[], torch.Tensor]
    stamp: Stamp
    posted_ns: int = field(default_factory=time.monotonic_ns)


class WorkQueue:
    """A thread that finishes jobs in the order in which they were given; it is one stream of the Program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._free_ns = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"weft-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> Handle:
        self._jobs.put(job)
        return job.handle

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
                job.handle.fail(failure)

    def _finish(self, job: Job) -> RunError | None:
        # The transfer may have begun before this thread was woken up.
        start_ns = max(job.posted_ns, self._free_ns)
        try:
            value = job.run()
            self._free_ns = time.monotonic_ns()
            job.stamp(start_ns, self._free_ns)
        except Exception as error:
            # torch reports every failed transfer as a plain RuntimeError.
            kind = PeerLostError if type(error) is RuntimeError else RunError
            failure = kind(f"{job.handle.label}: {self.name} failed: {first_line(error)}")
            job.handle.fail(failure)
            return failure
        job.handle.resolve(value)
        return None


class Channels:
    """All messages of one rank, over one process group of their own.

    `tags` gives every payload kind its own number, so that activations and gradients between the same two
    ranks cannot be taken for one another.
    """

    def __init__(self, group: dist.ProcessGroup, tags: dict[str, int]) -> None:
        self._group = group
        self._tags = tags
        self._queues: dict[tuple[int, str, str], WorkQueue] = {}

    def send(self, tensor: torch.Tensor, peer: int, payload: str, label: str, stamp: Stamp) -> Handle:
        """Send a contiguous tensor, which must not change until the handle is done."""
        # The group's own method: around it `dist.isend` does as much again in Python. All ranks are in the
        # group, so that their numbers in it are those of the job.
        post = partial(self._group.send, [tensor], peer, self._tags[payload])
        return self._queued(post, tensor, peer, "send", payload, label, stamp)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, payload: str, label: str, stamp: Stamp
    ) -> Handle:
        """Receive a tensor of that shape."""
        tensor = torch.empty(shape, dtype=dtype)
        post = partial(self._group.recv, [tensor], peer, self._tags[payload])
        return self._queued(post, tensor, peer, "receive", payload, label, stamp)

    def close(self) -> None:
        for work_queue in self._queues.values():
            work_queue.close()
        self._queues.clear()

    def _queued(
        self,
        post: Callable[[], dist.Work],
        tensor: torch.Tensor,
        peer: int,
        direction: str,
        payload: str,
        label: str,
        stamp: Stamp,
    ) -> Handle:
        key = (peer, direction, payload)
        if key not in self._queues:
            end = "to" if direction == "send" else "from"
            self._queues[key] = WorkQueue(f"{direction} of {payload} {end} rank {peer}")

        # Posted by the queue's thread: gloo may hold up the caller for a whole time slice, and the thread
        # that computes must not wait for it.
        def transfer() -> torch.Tensor:
            post().wait()
            return tensor

        return self._queues[key].put(Job(Handle(label), transfer, stamp))


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
