"""The computations of each rank's step, from a timeline of its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.errors import InputError, Violation
from weft.methods.bubble_filling.work import Busy, DeviceStep, PassName
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD, is_compute
from weft.program.program import NONE, Program
from weft.timeline.timeline import Timeline

# The gradients of the outputs of all layers of a stage exist behind the input part of a split backward.
ENDS: dict[int, PassName] = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward"}


def device_steps(program: Program, timeline: Timeline, period_s: float | None = None) -> list[DeviceStep]:
    """Return the step of every rank of a program.

    Args:
        program: the instructions, whose cycle is one step.
        timeline: one step of it, predicted or measured.
        period_s: seconds from a step to the next one. A rank's step then begins with its first computation,
            and all idle time between two steps is one gap. None: all steps begin with the first computation
            of all ranks and end with the last.

    Raises:
        InputError: if the timeline has several steps.
    """
    wanted = is_compute(timeline.kind) & (timeline.step != NONE)
    steps = np.unique(timeline.step[wanted])
    if len(steps) != 1:
        raise InputError(Violation("timeline", f"has {len(steps)} steps; gaps are those of one step"))
    rows = timeline.take(wanted)
    begin_ns, end_ns = int(rows.start_ns.min()), int(rows.end_ns.max())
    found = []
    for rank in range(program.ranks):
        mine = rows.take(rows.rank == rank)
        origin_ns = int(mine.start_ns.min()) if period_s is not None and len(mine) else begin_ns
        end_s = (end_ns - begin_ns) / 1e9 if period_s is None else period_s
        found.append(DeviceStep(_busy(mine, origin_ns), end_s))
    return found


def common_step(steps: Sequence[DeviceStep]) -> DeviceStep:
    """Return the step of devices with the same computations in one order, of which each gap is the shortest.

    Computations take as long as on the slowest device. Stages and micro-batches are those of the first one.
    """
    found, time = list[Busy](), 0.0
    before = [0.0] * len(steps)
    for same in zip(*(step.busy for step in steps), strict=True):
        start = time + min(one.start_s - end for one, end in zip(same, before, strict=True))
        time = start + max(one.end_s - one.start_s for one in same)
        found.append(replace(same[0], start_s=start, end_s=time))
        before = [one.end_s for one in same]
    end_s = time + min(step.end_s - end for step, end in zip(steps, before, strict=True))
    return DeviceStep(tuple(found), end_s)


def _busy(rows: Timeline, origin_ns: int) -> tuple[Busy, ...]:
    """Return the computations of one rank; of several parts of a pass, the last one ends it."""
    order = np.lexsort((rows.position, rows.start_ns))
    columns = (rows.kind, rows.stage, rows.micro_batch, rows.start_ns, rows.end_ns)
    listed = list(zip(*(column[order].tolist() for column in columns), strict=True))
    last = {
        (ENDS[kind], stage, micro_batch): place
        for place, (kind, stage, micro_batch, _, _) in enumerate(listed)
        if kind in ENDS
    }
    ended = {place: key for key, place in last.items()}
    busy = []
    for place, (_, _, _, start_ns, end_ns) in enumerate(listed):
        ends, stage, micro_batch = ended.get(place, (None, NONE, NONE))
        start_s, end_s = (start_ns - origin_ns) / 1e9, (end_ns - origin_ns) / 1e9
        busy.append(Busy(start_s, end_s, ends, stage, micro_batch))
    return tuple(busy)
