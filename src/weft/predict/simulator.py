"""Simulate a Program: the start and end of every instruction, until a cycle repeats the last one.

An instruction starts when its queue is free, its host has reached it and its edges' sources have ended. A
source's latency may follow its end. A collective starts on all members when the last one is ready. So does a
computation with an all-reduce of tensor ranks, and the slowest rank sets its time. A synchronous rank posts
nothing while it computes; an asynchronous one posts at once. Messages and collectives of one cycle share a
link while they overlap on it. Computations and transfers of one rank slow each other while they overlap.
Time is in int64 ticks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.describe.one_line import one_line
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.predict.costs import Costs
from weft.predict.engine import CycleGraph
from weft.predict.unroll import Unrolled, unroll
from weft.program.arrays import Ints
from weft.program.program import NONE, Program
from weft.timeline.timeline import Timeline

MAX_CYCLES = 16
STUCK_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The simulator's results for a Program.

    Attributes:
        timeline: the last simulated cycle; if `steady`, all later ones are like it. Instructions posted
            before that cycle began count as posted at its beginning.
        first_step_s: seconds to the end of the first step, with the prologue; `first_step_ticks` is exact.
        step_s: time per step of a steady cycle; the mean over the later half of the cycles if not `steady`.
        steady: True if every instruction of the next cycle would come exactly one period after the last
            cycle's, and so on.
        cycles: number of simulated cycles.
        peak_bytes: per rank, the most bytes live at once.
        peak_positions: per rank, the instruction that ends at the peak; -1 without changes.
        instructions: number of instructions in one cycle.
        simulate_s: seconds of the simulation itself.
    """

    timeline: Timeline
    first_step_ticks: int
    first_step_s: float
    step_s: float
    steady: bool
    cycles: int
    peak_bytes: Ints
    peak_positions: Ints
    instructions: int
    simulate_s: float

    def __repr__(self) -> str:
        peak = format_bytes(max(self.peak_bytes, default=0))
        step = f"step {format_seconds(self.step_s)}, largest peak {peak}"
        return one_line(self, f"of {self.instructions} instructions: {step}")


def simulate(
    program: Program,
    costs: Costs,
    *,
    max_cycles: int = MAX_CYCLES,
    run: str = "",
    plan_id: str = "",
    compiled: bool | None = None,
) -> Simulation:
    """Unroll the program until its period is exactly steady, or for `max_cycles` cycles.

    Args:
        program, costs: the instructions and their times; `costs` has one row per instruction.
        max_cycles: 1 simulates one isolated cycle.
        run, plan_id: names written into the timeline.
        compiled: True or False forces the compiled or the plain engine; they agree exactly.

    Raises:
        InputError: when instructions wait for each other in a circle; it names them.
    """
    began = time.perf_counter()
    unrolled = unroll(program, costs)
    ends: list[Ints] = []
    start = period = np.zeros(0, dtype=np.int64)
    steady_for, reach = 0, max(1, int(unrolled.carried.distance.max(initial=1)))
    carrying = np.unique(unrolled.carried.source)
    while len(ends) < max_cycles and steady_for < reach:
        graph = unrolled.later if ends else unrolled.first
        start, end, left = graph.run(_release(unrolled, ends), compiled)
        if left.any():
            raise InputError(_stuck(program, unrolled, graph, left))
        end[unrolled.late] = end[len(program) :]
        ends.append(end)
        if len(ends) > 1:
            # A cycle depends on earlier ones only by carried edges. After as many equal periods in a row as
            # these edges reach back, the next cycle, and all later ones, are like the last.
            shifts = np.unique((ends[-1] - ends[-2])[carrying])
            same = len(shifts) <= 1 and np.array_equal(shifts, period)
            steady_for = steady_for + 1 if same else int(len(shifts) <= 1)
            period = shifts
    steady = steady_for >= reach
    ticks = int(period[0]) if steady and len(period) else _mean_period(program, ends)
    start, last = start[: len(program)], ends[-1][: len(program)]
    peak, positions = peak_live_bytes(program, costs, last, ticks)
    first_step_ticks = int(ends[0][: len(program)][program.columns.iteration <= 0].max(initial=0))
    return Simulation(
        timeline=_timeline(
            program, costs, run, plan_id, _posted(unrolled, ends, ticks if steady else None), start, last
        ),
        first_step_ticks=first_step_ticks,
        first_step_s=first_step_ticks * costs.tick_s,
        step_s=ticks * costs.tick_s / program.steps_per_cycle,
        steady=steady,
        cycles=len(ends),
        peak_bytes=peak,
        peak_positions=positions,
        instructions=len(program),
        simulate_s=time.perf_counter() - began,
    )


def peak_live_bytes(program: Program, costs: Costs, end: Ints, period: float) -> tuple[Ints, Ints]:
    """Return each rank's peak live bytes and the row that ends at the peak; -1 for ranks without rows.

    Two cycles, `period` ticks apart, count. A rank may receive early for the next step while it still holds
    bytes of this one. At equal times additions come first. An instruction has its working bytes until its
    end, just before its own change. Both arrays have shape (ranks,).
    """
    changing = np.flatnonzero((costs.live_bytes != 0) | (costs.working != 0))
    peak = costs.base_bytes.copy()
    position = np.where(np.diff(program.rank_starts) > 0, program.rank_starts[:-1], NONE)
    # Rank by rank: sorting a few thousand changes at a time is faster than millions at once.
    starts = np.searchsorted(changing, program.rank_starts)
    for one in np.flatnonzero(np.diff(starts)).tolist():
        rows, held_bytes = _until_peak(costs, changing[starts[one] : starts[one + 1]], end, period)
        if held_bytes > 0:
            peak[one] += held_bytes
            position[one] = rows[-1]
    return peak, position


def _until_peak(costs: Costs, rows: Ints, end: Ints, period: float) -> tuple[Ints, int]:
    """Return the rows up to the peak, in order of their ends, and its bytes on top of the base."""
    rows, times = np.tile(rows, 2), np.concatenate([end[rows], end[rows] + round(period)])
    rows = rows[np.lexsort((costs.live_bytes[rows] < 0, times))]
    change = costs.live_bytes[rows]
    held = np.cumsum(change) + np.maximum(0, costs.working[rows] - change)
    highest = int(np.argmax(held))
    return rows[: highest + 1], int(held[highest])


class AtPeak(NamedTuple):
    """A rank's peak: the rows whose changes count, and the bytes that the running instruction takes."""

    rows: Ints
    working_bytes: int


def at_peak(program: Program, costs: Costs, simulation: Simulation, rank: int) -> AtPeak:
    """Return what a rank's peak in a simulation consists of."""
    timeline, end = simulation.timeline, np.zeros(len(program), dtype=np.int64)
    end[timeline.position] = timeline.end_ns
    mine = np.arange(*program.rank_starts[rank : rank + 2])
    changing = mine[(costs.live_bytes[mine] != 0) | (costs.working[mine] != 0)]
    if not len(changing):
        return AtPeak(changing, 0)
    period_ns = simulation.step_s * program.steps_per_cycle * 1e9
    rows, held_bytes = _until_peak(costs, changing, end, period_ns)
    if held_bytes <= 0:
        return AtPeak(rows[:0], 0)
    working_bytes = int(costs.working[rows[-1]])
    # It frees its own bytes at its end only.
    return AtPeak(rows[:-1], working_bytes) if working_bytes > costs.live_bytes[rows[-1]] else AtPeak(rows, 0)


def _mean_period(program: Program, ends: list[Ints]) -> float:
    """Return the ticks per cycle over the later half of the cycles."""
    body = program.columns.iteration != NONE
    finish = [int(end[: len(program)][body].max(initial=0)) for end in ends]
    if len(finish) == 1:
        return finish[0]
    first = (len(finish) - 1) // 2
    return (finish[-1] - finish[first]) / (len(finish) - 1 - first)


def _release(unrolled: Unrolled, ends: list[Ints]) -> Ints:
    """Return the earliest starts of the next cycle's instructions that earlier cycles allow."""
    release = np.zeros(len(unrolled.first), dtype=np.int64)
    carried = unrolled.carried
    for distance in np.unique(carried.distance[carried.distance <= len(ends)]):
        mine = carried.distance == distance
        ready = ends[-distance][carried.source[mine]] + unrolled.carried_delay[mine]
        np.maximum.at(release, carried.target[mine], ready)
    return release


def _posted(unrolled: Unrolled, ends: list[Ints], period: float | None) -> Ints:
    """Return the post times of the last cycle's instructions; 0 on asynchronous ranks.

    The cycle before a steady one came a `period` earlier.
    """
    after = np.maximum(unrolled.posted_after, 0)
    if period is not None:
        before = ends[-1][after] - int(period)
    else:
        before = ends[-2][after] if len(ends) > 1 else np.zeros_like(after)
    posted = np.where(unrolled.posted_later, before, ends[-1][after])
    return np.where(unrolled.posted_after == NONE, 0, posted)


def _timeline(
    program: Program, costs: Costs, run: str, plan_id: str, posted: Ints, start: Ints, end: Ints
) -> Timeline:
    columns = program.columns
    # Rows are already in order of rank, and mostly of one step: sorting millions takes long.
    order: Ints | slice = slice(None)
    if (np.diff(columns.iteration) < 0).any():
        order = np.argsort(columns.iteration, kind="stable")
    origin = start.min(initial=np.iinfo(np.int64).max)

    def nanoseconds(ticks: Ints) -> Ints:
        ticks = np.maximum(ticks, origin)[order] - origin
        return ticks if costs.tick_s == 1e-9 else np.rint(ticks * (costs.tick_s / 1e-9)).astype(np.int64)

    return Timeline.of(
        program,
        order,
        run=run,
        plan_id=plan_id,
        clock="predicted",
        step=columns.iteration[order],
        posted_ns=nanoseconds(posted),
        start_ns=nanoseconds(start),
        end_ns=nanoseconds(end),
    )


def _stuck(program: Program, unrolled: Unrolled, graph: CycleGraph, left: Ints) -> Violation:
    """Return a violation that lists a circle of instructions that wait for each other."""
    before = np.full(len(left), NONE, dtype=np.int64)
    blocked = left[graph.source] > 0
    before[graph.target[blocked]] = graph.source[blocked]
    # A present member of a collective waits for an absent one.
    meeting = graph.meeting
    for row in np.flatnonzero((left > 0) & (before == NONE)).tolist():
        absent = np.flatnonzero((meeting == meeting[row]) & (before != NONE))
        before[row] = absent[0]
    seen: dict[int, int] = {}
    row = int(np.flatnonzero(left)[0])
    while row not in seen:
        seen[row] = len(seen)
        row = int(before[row])
    # The end node of a late row appears as that row.
    row_of = np.concatenate([np.arange(len(program)), unrolled.late])
    circle = list(dict.fromkeys(int(row_of[node]) for node, turn in seen.items() if turn >= seen[row]))[::-1]
    words = [f"rank {int(program.columns.rank[p])} {program.instruction(p)}" for p in circle[:STUCK_SHOWN]]
    more = f" and {len(circle) - STUCK_SHOWN} more" if len(circle) > STUCK_SHOWN else ""
    return Violation("program", f"instructions wait for each other: {' -> '.join(words)}{more}")
