"""Streams of a device that is late: everything that is run, computations too, waits on a thread for a while.

Nothing is in order but what the instructions themselves say. What each of them is known to follow is kept in
a clock: the instructions that must have ended before, by the order of its stream and by what it reads.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from weft.program.program import NONE, Instruction, Program
from weft.program.rank_program import RankProgram
from weft.run.executor import all_handlers
from weft.run.handlers.base import Handler, Issue
from weft.run.streams import Completion, Stream, Value
from weft.run.work_queue import WorkQueue
from weft.run.workspace import Workspace

MOST_LATE_S = 2e-3

# A step and the position of an instruction.
Event = tuple[int, int]


class Clock:
    """By completion, what has ended when it has: a vector clock with a set in place of numbers."""

    def __init__(self) -> None:
        self.events: dict[Event, set[Event]] = {}
        self._known: defaultdict[Completion, set[Event]] = defaultdict(set)

    def merge(self, into: Completion, sources: list[Completion]) -> None:
        self._known[into].update(*(self._known[source] for source in sources))

    def name(self, completion: Completion, event: Event) -> None:
        self.events[event] = self._known[completion]
        self._known[completion].add(event)

    def missing(self, program: Program, rank: int, steps: int) -> list[str]:
        """The Program's edges within a rank that no instruction has stated, by itself or through others."""
        edges, ranks = program.edges, program.columns.rank
        found = []
        for source, target, distance in zip(edges.source, edges.target, edges.distance, strict=True):
            if ranks[source] != rank or ranks[target] != rank:
                continue
            for step in range(int(distance), steps):
                if (step - int(distance), int(source)) not in self.events[step, int(target)]:
                    ends = (program.instruction(int(row)) for row in (source, target))
                    found.append("{} does not follow {}".format(*reversed([str(end) for end in ends])))
        return sorted(set(found))


class LateStream:
    """A thread that takes its time before everything it does."""

    def __init__(self, name: str, draw: random.Random, clock: Clock) -> None:
        self.queue = WorkQueue(name)
        self._draw = draw
        self._clock = clock
        self._last: list[Completion] = []

    def run(self, label: str, work: Callable[[], None], *reads: Value) -> Completion:
        late_s = self._draw.choice((0.0, self._draw.uniform(0.0, MOST_LATE_S)))

        def work_late() -> None:
            time.sleep(late_s)
            work()

        completion = self.queue.run(label, work_late, *reads)
        self._clock.merge(completion, [*self._last, *(value.completion for value in reads)])
        self._last = [completion]
        return completion


class LateStreams:
    """One thread for each stream of a rank's Program."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self._draw = random.Random(seed)
        self._clock = clock
        self._streams: dict[tuple[str, int], LateStream] = {}

    def of(self, instruction: Instruction) -> Stream:
        key = (instruction.kind.stream, NONE if instruction.kind.collective else instruction.peer)
        if key not in self._streams:
            self._streams[key] = LateStream(instruction.kind.stream, self._draw, self._clock)
        return self._streams[key]

    @property
    def loading(self) -> Stream:
        return self._named("micro-batches")

    @property
    def copying(self) -> Stream:
        return self._named("checkpoint")

    @property
    def reading(self) -> Stream:
        return self._named("results")

    def _named(self, name: str) -> LateStream:
        if (name, NONE) not in self._streams:
            self._streams[name, NONE] = LateStream(name, self._draw, self._clock)
        return self._streams[name, NONE]

    def order(self, program: RankProgram) -> None:
        """Threads wait for what they read."""

    def notice(self) -> int:
        """Threads report by themselves."""
        return 0

    def close(self) -> None:
        for stream in self._streams.values():
            stream.queue.close()


@contextmanager
def late(seed: int) -> Iterator[Clock]:
    """Runtimes that are made in this block have late streams, whose clock is given."""
    clock = Clock()
    watched = {name: _watched(handler, clock) for name, handler in all_handlers().items()}
    with (
        patch("weft.run.resources.open_streams", lambda device, **_: LateStreams(seed, clock)),
        patch("weft.run.executor.all_handlers", lambda: watched),
    ):
        yield clock


def _watched(handler: Handler, clock: Clock) -> Handler:
    def bind(workspace: Workspace, instruction: Instruction) -> Issue:
        inner = handler(workspace, instruction)

        def issue(stream: Stream) -> Completion:
            completion = inner(stream)
            clock.name(completion, (workspace.step, instruction.position))
            return completion

        return issue

    return bind
