"""Streams, completions and values: the order of a rank's instructions.

Every instruction is issued once per step, in the order of the Program, to its stream. This is the queue
(rank, stream, peer) of the Program. `issue(stream)` states the work and the values it reads, and returns a
completion. It never waits for a result to put work in order; ordering is up to the stream. The host's own
thread blocks the host, and a queue blocks its thread. A stream of an accelerator lets the device wait for an
event while the host goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from weft.program.program import Instruction
from weft.program.rank_program import RankProgram

if TYPE_CHECKING:
    from weft.run.program_order import ProgramOrder

# Start and end of an instruction, in nanoseconds of `time.monotonic_ns`.
Times = tuple[int, int]
Stamp = Callable[[int, int], None]

Content = TypeVar("Content")


class Completion(Protocol):
    """The end of one instruction's work. Only completions block."""

    @property
    def times(self) -> Times | None:
        """The work's start and end; None until a thread has noticed its successful end."""
        ...

    def wait(self) -> None:
        """Block until the work has ended; several threads may call it.

        Raises:
            RunError: the first failure in this work or in work it depends on, labelled with that instruction.
                A `PeerLostError` if another rank was lost.
        """
        ...

    def report_to(self, stamp: Stamp) -> None:
        """Have `stamp` called once with the times when a thread notices the end; never after a failure.

        If the times are known, this call does it. Otherwise a working thread does, or the first `wait` that
        returns: an accelerator gives its times on request only.
        """
        ...


class Ended:
    """The completion of finished work: the thread that issued the work also did it.

    `Ended` and `Value` have no `__init__`: an instruction of a few microseconds makes several of them.
    """

    __slots__ = ("times",)

    times: Times

    @classmethod
    def at(cls, times: Times) -> Ended:
        ended = cls()
        ended.times = times
        return ended

    @classmethod
    def now(cls) -> Ended:
        """Return the completion of work that had nothing to do."""
        now = time.monotonic_ns()
        return cls.at((now, now))

    def wait(self) -> None:
        """Return at once: the work has ended."""

    def report_to(self, stamp: Stamp) -> None:
        stamp(*self.times)


class Reports:
    """The common part of completions that end later: their times, and the stamps to call with them."""

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
        # Two threads may get here: one ends the work, one waits for it. A stamp is taken once.
        while self._stamps:
            try:
                stamp = self._stamps.pop()
            except IndexError:
                return
            stamp(*times)


_LONG_AGO = Ended.at((0, 0))


class Value(Generic[Content]):
    """Data that instructions hand to each other, with the completion that makes it valid.

    The issuer of the work that makes a value sets its completion; the work sets its content. Only work that
    lists the value among its reads looks at the content. A value without content states that work has been
    done.
    """

    __slots__ = ("completion", "content")

    completion: Completion
    content: Content

    @classmethod
    def of(cls, content: Content, completion: Completion = _LONG_AGO) -> Value[Content]:
        """Return a value with that content; without a completion it has always been there."""
        value = cls()
        value.content, value.completion = content, completion
        return value


# Stands for a value that needs no work.
THERE = Value.of(None)


class Stream(Protocol):
    """One queue of a rank's Program: its work runs in order, concurrent with other streams."""

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        """Do `work` when all earlier work of this stream has ended and all values that it reads are there.

        The work is called once: within this call, or later by a thread of the stream. It may block the thread
        that calls it. On an accelerator it is called within this call, with the stream as torch's current
        stream. The kernels that it launches run later. The values that the work reads must outlive these
        kernels: a completion keeps them until its end has been noticed.

        Args:
            label: names the instruction, for errors.
            reads: every value that the work reads or follows, with or without content.

        Returns:
            The end of the work. It fails if the work raises, or if earlier work of the stream or a value it
            reads has failed. Work done within the call may raise at once instead.
        """
        ...


class Streams(Protocol):
    """The streams of one rank."""

    @property
    def loading(self) -> Stream | None:
        """The stream of work that copies micro-batches to the device, with memory of its own.

        None where they are there, and to start work would take longer than to use them.
        """
        ...

    @property
    def copying(self) -> Stream:
        """The stream of work that copies weights and optimizer states to host memory."""
        ...

    @property
    def reading(self) -> Stream:
        """The stream of work that reads numbers to the host."""
        ...

    def of(self, instruction: Instruction) -> Stream:
        """Return the stream of this instruction, the same in every step."""
        ...

    def order(self, program: RankProgram) -> ProgramOrder | None:
        """Return the waits of a Program between streams of a device; None where no stream is one."""
        ...

    def notice(self) -> int:
        """Report the times of work that has ended without anybody who waits; any thread may call it.

        Returns:
            The bound of the error of all times, in nanoseconds.
        """
        ...

    def close(self) -> None:
        """Finish the work under way and end the threads."""
        ...
