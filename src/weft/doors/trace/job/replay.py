"""Simulations of a trace's steps from its own times, and from usual ones.

A pass keeps its duration. A message or a collective keeps its transfer, the time behind the last start of its
members. An ideal operation takes what is usual for its type over all ranks and steps. For passes and other
local work this is the mean, for transfers the median.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from weft.doors.trace.job.operations import PASSES, is_meeting
from weft.doors.trace.job.program import ImpliedProgram
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.arrays import Floats, Ints, Mask
from weft.program.checks.messages import collective_codes
from weft.program.kinds import is_collective
from weft.program.program import NONE
from weft.timeline.timeline import Timeline

TICK_S = 1e-9


class Replay:
    """Simulations of the steps of a trace; seconds are by instruction."""

    def __init__(self, implied: ImpliedProgram) -> None:
        self.implied = implied

    @cached_property
    def own_s(self) -> Floats:
        """Each step's own times: durations, and transfers of what meets; shape (steps, instructions)."""
        implied, program = self.implied, self.implied.program
        start, end = (getattr(implied.operations, one)[implied.rows] for one in ("start_s", "end_s"))
        last = start.copy()
        sends = np.flatnonzero(implied.receive_of != NONE)
        receives = implied.receive_of[sends]
        last[:, sends] = last[:, receives] = np.maximum(start[:, sends], start[:, receives])
        rows = np.flatnonzero(is_collective(program.columns.kind) & (program.columns.group != NONE))
        _, meeting = np.unique(collective_codes(program, rows), return_inverse=True)
        for index in range(len(start)):
            latest = np.full(len(rows), -np.inf)
            np.maximum.at(latest, meeting, start[index, rows])
            last[index, rows] = latest[meeting]
        taken = np.where(is_meeting(implied.types), np.maximum(end - last, 0.0), end - start)
        # The sender of a Program bears a message's time. A send may wait for more than its own message.
        taken[:, sends] = taken[:, receives]
        taken[:, receives] = 0.0
        return np.asarray(taken)

    @cached_property
    def ideal_s(self) -> Floats:
        """The usual time of each instruction's type over all ranks and steps."""
        implied, own = self.implied, self.own_s
        usual = np.zeros(own.shape[1])
        for kind in np.unique(implied.types).tolist():
            mine = implied.types == kind
            bears = mine & ~self._fed_by_sender
            times = own[:, bears]
            if times.size:
                usual[bears] = np.median(times) if is_meeting(np.array(kind)) else times.mean()
        return usual

    @cached_property
    def _fed_by_sender(self) -> Mask:
        receives = np.zeros(len(self.implied.program), dtype=np.bool_)
        receives[self.implied.receive_of[self.implied.receive_of != NONE]] = True
        return receives

    def step_s(self, seconds: Floats) -> float:
        """Return the length of a step whose instructions take these seconds."""
        return simulate(self.implied.program, self._costs(seconds), max_cycles=1).step_s

    def mean_s(self, own: Mask, steps: list[int]) -> float:
        """Return the mean step in which only the instructions `own` take their own times."""
        ideal = self.ideal_s
        return float(np.mean([self.step_s(np.where(own, self.own_s[step], ideal)) for step in steps]))

    def balanced_s(self, step: int) -> Floats:
        """Return a step's times with passes that take as long in all stages of a replica as in their mean."""
        seconds, (_, replica) = self.own_s[step].copy(), self.places
        for kind in PASSES:
            for one in np.unique(replica).tolist():
                mine = (self.implied.types == kind) & (replica == one)
                seconds[mine] = seconds[mine].mean() if mine.any() else 0.0
        return np.asarray(seconds)

    def timeline(self, seconds: Floats) -> Timeline:
        """Return the times of a step whose instructions take these seconds."""
        return simulate(self.implied.program, self._costs(seconds), max_cycles=1).timeline

    @cached_property
    def variation(self) -> float:
        """The median over ranks of a step's relative deviation of passes of one type, from each other."""
        implied, found = self.implied, []
        types, rank = implied.types, implied.program.columns.rank
        for kind in PASSES:
            for one in np.unique(rank).tolist():
                times = self.own_s[:, (types == kind) & (rank == one)]
                if times.shape[1] > 1:
                    found.append(float(np.median(times.std(axis=1) / times.mean(axis=1))))
        return float(np.median(found)) if found else 0.0

    def measured(self, step: int) -> Timeline:
        """Return the recorded times of a step."""
        operations, rows = self.implied.operations, self.implied.rows[step]
        program = self.implied.program
        start, end = (
            np.rint(getattr(operations, one)[rows] * 1e9).astype(np.int64) for one in ("start_s", "end_s")
        )
        return Timeline.of(
            program,
            slice(None),
            run=operations.name,
            plan_id="",
            clock="measured",
            step=np.zeros(len(program), dtype=np.int64),
            posted_ns=start,
            start_ns=start,
            end_ns=end,
        )

    @property
    def places(self) -> tuple[Ints, Ints]:
        """The stage and the replica of each instruction's rank."""
        first = self.implied.operations.take(self.implied.operation)
        return first.stage, first.replica

    def _costs(self, seconds: Floats) -> Costs:
        program = self.implied.program
        nothing = np.zeros(len(program), dtype=np.int64)
        return Costs(
            occupancy=np.rint(seconds / TICK_S).astype(np.int64),
            latency=nothing,
            tick_s=TICK_S,
            synchronous=np.zeros(program.ranks, dtype=np.bool_),
            live_bytes=nothing,
            base_bytes=np.zeros(program.ranks, dtype=np.int64),
        )
