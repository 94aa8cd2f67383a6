"""Streams of a rank on an accelerator: the device computes while the host goes on.

Computations are kernels of the device's default stream, where tensors are allocated. If messages and
collectives are kernels, too, each has a stream of the device, which waits for events. If they go through host
memory, each has a thread. It copies on a stream of its own and waits for its copies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from weft.run.accelerator import Accelerator, DeviceStream, Event
from weft.run.streams import Completion, Reports, Times, Value
from weft.run.work_queue import WorkQueue, labelled

# The clocks of host and device are compared again after this time.
ANCHORED_NS = 1_000_000_000


class Anchor(NamedTuple):
    """An event and its time on the host's clock, `time.monotonic_ns`, with the largest error of that time."""

    event: Event
    host_ns: int
    error_ns: int

    def span(self, start: Event, end: Event) -> Times:
        """Return the host's times of two later events that the device has reached."""
        first_ns, last_ns = (
            self.host_ns + round(1e6 * self.event.elapsed_time(event)) for event in (start, end)
        )
        return first_ns, max(first_ns, last_ns)


class DeviceClock:
    """Compares the clocks of host and device, again and again because they drift."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # No kernel is ever in this stream, so the device reaches its events at once.
        self._stream = accelerator.stream()
        # Of all comparisons so far.
        self.error_ns = 0
        self._anchor = self._compared()

    def anchor(self) -> Anchor:
        """Return the last comparison, at most `ANCHORED_NS` old."""
        if time.monotonic_ns() - self._anchor.host_ns > ANCHORED_NS:
            self._anchor = self._compared()
        return self._anchor

    def _compared(self) -> Anchor:
        event = self._accelerator.event()
        before_ns = time.monotonic_ns()
        with self._stream:
            event.record()
        event.synchronize()
        after_ns = time.monotonic_ns()
        compared = Anchor(event, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)
        self.error_ns = max(self.error_ns, compared.error_ns)
        return compared


class DeviceWork(Reports):
    """The end of kernels that the host has launched in a stream.

    It keeps the values that other streams made. The allocator gives their memory away once the host
    drops them, even if kernels still read it. `order` is that of the Program with the instruction, if one is
    the work of an instruction.
    """

    def __init__(
        self,
        label: str,
        stream: KernelStream,
        start: Event,
        end: Event,
        anchor: Anchor,
        kept: Sequence[Value[Any]],
        order: object = None,
    ) -> None:
        super().__init__()
        self.stream, self.start, self.end_event = stream, start, end
        self.order = order
        self._label = label
        self._anchor = anchor
        self._kept = tuple(kept)
        self._lock = threading.Lock()

    def wait(self) -> None:
        if self.times is None:
            try:
                self.end_event.synchronize()
            except RuntimeError as error:
                raise labelled(error, self._label, self.stream.name) from error
            self._notice()

    def ended(self) -> bool:
        """Return True if the device has done the work; its times are known then."""
        if self.times is None and self.end_event.query():
            self._notice()
        return self.times is not None

    def _notice(self) -> None:
        with self._lock:
            if self.times is None:
                self._kept = ()
                self.end(self._anchor.span(self.start, self.end_event))


class KernelStream:
    """A stream of the device: `run` launches the work's kernels and returns. One thread calls it.

    Args:
        name: of the stream in error messages.
        clock: shared by the streams of a rank.
        beside: a stream of the device; None for its default one, where tensors are allocated unless work
            does it itself.
        after: the stream of computations; all kernels follow those launched in it before. So memory that the
            host allocated for the work is free of them.
    """

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        clock: DeviceClock,
        beside: DeviceStream | None = None,
        *,
        after: KernelStream | None = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self._accelerator = accelerator
        self._beside = beside
        self._after = after
        self._under_way: deque[DeviceWork] = deque()
        self._pool: list[Event] = []

    def run(
        self, label: str, work: Callable[[], None], *reads: Value[Any], order: object = None
    ) -> Completion:
        """Run as `Stream`; whoever gives an `order` has let the stream follow the works with the same one."""
        others = [value for value in reads if not self._made(value.completion)]
        self._collect()
        anchor, start, end = self.clock.anchor(), self._event(), self._event()
        with self._entered():
            _follow(value.completion for value in others if not _ordered(value.completion, order))
            start.record()
            work()
            end.record()
        launched = DeviceWork(label, self, start, end, anchor, others, order)
        self._under_way.append(launched)
        return launched

    def follow(self, completions: Iterable[Completion]) -> None:
        """Let further kernels run after the end of other work; the host waits for what is no kernel."""
        with nullcontext() if self._beside is None else self._beside:
            _follow(completions)

    def notice(self) -> None:
        """Report the times of work that the device has done; any thread may call it."""
        # Whoever waits for work that failed raises its error.
        with suppress(RuntimeError):
            for work in self._under_way.copy():
                if not work.ended():
                    return

    def close(self) -> None:
        """Wait until the device has done all kernels."""
        while self._under_way:
            self._under_way.popleft().wait()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        posted = None if self._after is None else self._event()
        if posted is not None:
            posted.record()
        with nullcontext() if self._beside is None else self._beside:
            if posted is not None:
                posted.wait()
                # The stream waits for the place that is marked now, so the event may mark another.
                self._pool.append(posted)
            yield

    def _made(self, completion: Completion) -> bool:
        return isinstance(completion, DeviceWork) and completion.stream is self

    def _collect(self) -> None:
        """Notice the ends of earlier work, which gives back what it keeps, and its events."""
        while self._under_way and self._under_way[0].ended():
            done = self._under_way.popleft()
            self._pool += (done.start, done.end_event)

    def _event(self) -> Event:
        return self._pool.pop() if self._pool else self._accelerator.event()


def _follow(completions: Iterable[Completion]) -> None:
    """Let the current stream wait for other kernels, and the host for what is no kernel."""
    for one in completions:
        if one.times is None:
            if isinstance(one, DeviceWork):
                one.end_event.wait()
            else:
                one.wait()


def _ordered(completion: Completion, order: object) -> bool:
    return order is not None and isinstance(completion, DeviceWork) and completion.order is order


class CopyQueue(WorkQueue):
    """A thread whose copies to and from the device have a stream of their own.

    They follow the kernels that the host had launched when the work was posted. So the memory that the host
    allocated for the work is free of earlier kernels.
    """

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        super().__init__(name)
        self._accelerator = accelerator
        self._stream = accelerator.stream()

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        posted = self._accelerator.event()
        posted.record()

        def copy() -> None:
            with self._stream:
                posted.wait()
                work()
            self._stream.synchronize()

        return super().run(label, copy, *reads)
