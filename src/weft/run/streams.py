"""Streams, completions and values: how the instructions of a rank are put in order.

Every instruction is issued once per step, in the order of the Program, to the stream of its kind: the queue
(rank, stream, peer) of the Program. `issue(stream)` says what the instruction does and which values it reads,
and returns a completion. It never waits for a result in order to put work in order: what that takes is up to
the stream. The host's own thread blocks the host, a queue blocks its thread, and a stream of an accelerator
lets the device wait for an event while the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from weft.program.program import Instruction

# Start and end of an instruction, in nanoseconds of `time.monotonic_ns`.
Times = tuple[int, int]
Stamp = Callable[[int, int], None]

Content = TypeVar("Content")


class Completion(Protocol):
    """The end of one instruction's work. Only completions block."""

    @property
    def times(self) -> Times | None:
        """When the work began and ended; None until somebody has noticed that it has ended well."""
        ...

    def wait(self) -> None:
        """Block until the work has ended; any thread may call it, and more than one.

        Raises:
            RunError: what went wrong first, in this work or in what it follows, with the label of that
                instruction. `PeerLostError` when it was another rank.
        """
        ...

    def report_to(self, stamp: Stamp) -> None:
        """Have `stamp` called once with the times, by whoever notices the end; never after a failure.

        That is this call where the times are known, a thread that does the work, or the first `wait` that
        returns where nobody else looks: an accelerator tells its times to who asks.
        """
        ...


class Ended:
    """The completion of work that is done, which is all that a thread leaves behind that did it itself.

    It has no `__init__`, nor has a value: there are several of them to an instruction of a few microseconds.
    """

    __slots__ = ("times",)

    times: Times

    @classmethod
    def at(cls, times: Times) -> Ended:
        ended = cls()
        ended.times = times
        return ended

    def wait(self) -> None:
        """Nobody has to."""

    def report_to(self, stamp: Stamp) -> None:
        stamp(*self.times)


class Reports:
    """What completions share that end later: times, and who wants to know them."""

    def __init__(self) -> None:
        self.times: Times | None = None
        self._stamps: list[Stamp] = []

    def report_to(self, stamp: Stamp) -> None:
        self._stamps.append(stamp)
        if self.times is not None:
            self._report(self.times)

    def end(self, times: Times) -> None:
        self.times = times
        self._report(times)

    def _report(self, times: Times) -> None:
        # Two threads may get here: one that ends the work, one that comes to ask. A stamp is taken once.
        while self._stamps:
            try:
                stamp = self._stamps.pop()
            except IndexError:
                return
            stamp(*times)


_LONG_AGO = Ended.at((0, 0))


class Value(Generic[Content]):
    """What instructions hand to each other, with the completion that makes it valid.

    Who issues the work that makes a value sets its completion, the work sets its content. Nobody looks at
    the content but work that has named the value among what it reads. A value may have no content and only
    say that something has been done.
    """

    __slots__ = ("completion", "content")

    completion: Completion
    content: Content

    @classmethod
    def of(cls, content: Content, completion: Completion = _LONG_AGO) -> Value[Content]:
        """Return one with that content; without a completion it has always been there."""
        value = cls()
        value.content, value.completion = content, completion
        return value


# In place of a value that nobody had to make.
THERE = Value.of(None)


class Stream(Protocol):
    """One queue of a rank's Program: what is run on it goes in order, beside what runs on other streams."""

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        """Do `work` when all that was run here before has ended, and all that it reads is there.

        The work is called once: within this call, or later by a thread of the stream. It may block the thread
        that calls it. On an accelerator it is called within this call, with the stream as torch's current
        one, and what it launches runs later. What the work reads has to outlive that: a completion keeps
        the values until its end has been noticed, and no longer.

        Args:
            label: names the instruction, for errors.
            reads: every value that the work looks at or follows, content or not.

        Returns:
            The end of the work. It fails when the work raises, or with the failure of what came before it on
            the stream or of what it reads. Work done within the call may instead raise at once.
        """
        ...


class Streams(Protocol):
    """The streams of one rank."""

    def of(self, instruction: Instruction) -> Stream:
        """Return the one to which this instruction is issued, step after step."""
        ...

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        ...
