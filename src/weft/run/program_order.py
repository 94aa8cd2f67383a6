"""`ProgramOrder`: the waits between the streams of a device, as the Program of a rank states them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from weft.program.program import Instruction
from weft.program.rank_program import RankProgram
from weft.program.stream_waits import stream_waits
from weft.run.device_streams import DeviceWork, KernelStream
from weft.run.streams import Completion, Stream, Value


class InProgram(NamedTuple):
    """A stream of the device for an instruction: what the Program puts in order needs no wait of its own."""

    stream: KernelStream
    order: ProgramOrder

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        return self.stream.run(label, work, *reads, order=self.order)


class ProgramOrder:
    """Lets each instruction follow the ones that its Program says, which stand for all that it reads.

    It keeps the last work of instructions that others wait for, of this step and of the step before.
    """

    def __init__(self, program: RankProgram) -> None:
        waits, step = stream_waits(program), program.columns.iteration
        later = step[waits.target] + waits.distance * program.steps_per_cycle - step[waits.source]
        first = program.first_row
        rows = (row.tolist() for row in (waits.source + first, waits.target + first, later))
        self._awaited = frozenset[int]((waits.source + first).tolist())
        self._waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, target, steps in zip(*rows, strict=True):
            self._waits[target].append((source, steps))
        self._launched: tuple[dict[int, Completion], dict[int, Completion]] = ({}, {})

    def begin_step(self) -> None:
        self._launched = {}, self._launched[0]

    def ordered(
        self, instruction: Instruction, issue: Callable[[Stream], Completion]
    ) -> Callable[[Stream], Completion]:
        """Return the issue of an instruction behind the waits of its stream."""
        position, label = instruction.position, str(instruction)
        waits, awaited = self._waits.get(position, []), position in self._awaited

        def in_order(stream: Stream) -> Completion:
            followed: Stream = stream
            if isinstance(stream, KernelStream):
                if waits:
                    found = (self._launched[steps].get(row) for row, steps in waits)
                    stream.follow(one for one in found if one is not None)
                followed = InProgram(stream, self)
            completion = issue(followed)
            if awaited:
                # Others wait for this place in the stream, also if the instruction has nothing to do.
                marks = isinstance(stream, KernelStream) and not isinstance(completion, DeviceWork)
                self._launched[0][position] = followed.run(label, _nothing) if marks else completion
            return completion

        return in_order


def _nothing() -> None:
    """Launch no kernel."""
