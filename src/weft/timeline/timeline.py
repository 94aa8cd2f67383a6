"""`Timeline`: predicted or measured events, one row per instruction and step.

Predicted and measured rows of one instruction share its id. Reports, straggler analysis, what-if analysis and
calibration read that join.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.plan_versions import current_id
from weft.program.arrays import Ids, Ints, Mask
from weft.program.kinds import KINDS, all_kinds
from weft.program.program import NONE, Program


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Rows sorted by (step, rank, position in the rank's program).

    Attributes:
        run, plan_id: run and plan of these rows.
        clock: `predicted`, or the name of the clock of the measurement.
        step: optimizer step, counted from 0.
        id: the instruction's id in the Program; `position` is its row there.
        kind: code in `weft.program.kinds.KINDS`; stage, micro_batch, rank, stream, group, bytes as there.
        posted_ns, start_ns, end_ns: int64 nanoseconds since the start of the first step of the timeline:
            the host reaches the instruction; the instruction begins; it ends.
        clock_error_ns: bounds the error of the last two; 0 if no accelerator measured them.
    """

    run: str
    plan_id: str
    clock: str
    step: Ints
    id: Ids
    position: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints
    rank: Ints
    stream: Ints
    group: Ints
    bytes: Ints
    posted_ns: Ints
    start_ns: Ints
    end_ns: Ints
    clock_error_ns: int = 0

    @classmethod
    def of(cls, program: Program, rows: Ints | slice, **rest: Any) -> Timeline:
        """Return the timeline of these rows of a program; `rest` are the fields that it does not know."""
        columns = program.columns
        known = ("kind", "stage", "micro_batch", "rank", "group", "bytes")
        return cls(
            id=program.ids[rows],
            position=np.arange(len(program), dtype=np.int64)[rows],
            stream=program.stream[rows],
            **{name: getattr(columns, name)[rows] for name in known},
            **rest,
        )

    def __repr__(self) -> str:
        of = f"plan {self.plan_id} of run {self.run}" if self.run else f"plan {self.plan_id}"
        steps, ranks = len(np.unique(self.step)), len(np.unique(self.rank))
        return one_line(self, f"{self.clock}: {len(self)} rows, {steps} steps of {ranks} ranks, of {of}")

    def __len__(self) -> int:
        return len(self.id)

    def take(self, rows: Mask) -> Timeline:
        """Return the rows where `rows`, shape (rows,), is true."""
        return replace(self, **{name: getattr(self, name)[rows] for name in TIMELINE_COLUMNS})


def under_current_id(timeline: Timeline, plan: Plan) -> Timeline:
    """Return a timeline of a plan with the plan's current id, even if an earlier version of weft wrote it."""
    return replace(timeline, plan_id=current_id(timeline.plan_id, plan))


TIMELINE_COLUMNS = (
    "step",
    "id",
    "position",
    "kind",
    "stage",
    "micro_batch",
    "rank",
    "stream",
    "group",
    "bytes",
    "posted_ns",
    "start_ns",
    "end_ns",
)


def stream_names() -> tuple[str, ...]:
    """Return the names of all streams, in the order of codes in `Timeline.stream` and `Program.stream`."""
    return tuple(dict.fromkeys(kind.stream for kind in all_kinds()))


def label(kind: int, stage: int, micro_batch: int) -> str:
    """Return a short name of an instruction, such as ``F2.1``."""
    text = KINDS[kind].symbol + ("" if stage == NONE else str(stage))
    return text if micro_batch == NONE else f"{text}.{micro_batch}"
