"""Simulate a Program: when every instruction starts and ends, until one cycle is like the next.

An instruction starts when its queue is free, its host has reached it and its edges have ended (plus the
source's latency); a collective starts on all members when the last one is ready, and so does a computation
in which tensor ranks all-reduce; it takes all of them as long as the slowest. A synchronous rank posts
nothing while it computes; an asynchronous one posts at once. Messages and collectives of one cycle that are
under way on the same link at once share it, and computations and transfers of one rank slow each other while
they overlap.
Time is int64 ticks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation
from weft.predict.costs import Costs
from weft.predict.engine import CycleGraph
from weft.predict.live_bytes import peak_live_bytes
from weft.predict.tasks import tasks_of
from weft.program.checks.messages import collective_codes
from weft.program.codes import codes
from weft.program.kinds import KINDS, is_collective, is_compute
from weft.program.program import NONE, Edges, Ints, Program
from weft.timeline.timeline import Timeline

Mask = npt.NDArray[np.bool_]

MAX_CYCLES = 16
STUCK_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What the simulator says about a Program.

    Attributes:
        timeline: the last cycle simulated, like all later ones if `steady`. Instructions posted before that
            cycle began count as posted at its beginning.
        first_step_s: from nothing to the end of the first step, the prologue included; `first_step_ticks`
            is the same, exact.
        step_s: time per step of a steady cycle; the mean over the later half of the cycles if not `steady`.
        steady: whether every instruction of the next cycle would come exactly one period after that of the
            last, and so on.
        cycles: how many cycles were simulated.
        peak_bytes: per rank, the most bytes live at once.
        peak_positions: per rank, the instruction at whose end that happens; -1 where nothing changes.
        instructions: instructions of one cycle.
        simulate_s: what the simulation itself took.
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


@dataclass(frozen=True, kw_only=True)
class _Unrolled:
    """A cycle's inner edges, and those that reach over cycles, from which its release times come.

    `first` differs from `later` only by the prologue. `posted_after` is the computation whose end lets the
    host of a synchronous rank reach a row, in the same cycle or, where `posted_later`, in the one before.
    The rows `late` end with nodes of their own, in their order after all rows.
    """

    first: CycleGraph
    later: CycleGraph
    late: Ints
    carried: Edges
    carried_delay: Ints
    posted_after: Ints
    posted_later: Mask


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
    unrolled = _unroll(program, costs)
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
            # A cycle depends on earlier ones by what reaches over to it alone: as many equal periods of that
            # in a row as edges reach back make the next cycle, and all later ones, like the last.
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


def _mean_period(program: Program, ends: list[Ints]) -> float:
    """Ticks per cycle over the later half of the cycles."""
    body = program.columns.iteration != NONE
    finish = [int(end[: len(program)][body].max(initial=0)) for end in ends]
    if len(finish) == 1:
        return finish[0]
    first = (len(finish) - 1) // 2
    return (finish[-1] - finish[first]) / (len(finish) - 1 - first)


def _unroll(program: Program, costs: Costs) -> _Unrolled:
    """Every constraint as an edge: the program's own, queues' order, and hosts of synchronous ranks."""
    rows = np.arange(len(program), dtype=np.int64)
    prologue = program.columns.iteration == NONE
    by_queue = np.argsort(program.queue, kind="stable")
    queue = program.queue[by_queue]
    same = queue[1:] == queue[:-1]
    host, host_later, waits = _host_edges(program, costs)
    inner = [
        (program.edges.source, program.edges.target, program.edges.distance, True),
        (by_queue[:-1][same], by_queue[1:][same], 0, False),
        (host[waits], rows[waits], host_later[waits].astype(np.int64), False),
    ]
    # In a steady cycle a queue goes on where it ended in the cycle before; the prologue does not come back.
    body = by_queue[~prologue[by_queue]]
    first = np.flatnonzero(np.diff(program.queue[body], prepend=-1))
    last = np.append(first[1:], len(body)) - 1 if len(first) else first
    inner.append((body[last], body[first], 1, False))
    source = np.concatenate([item[0] for item in inner])
    target = np.concatenate([item[1] for item in inner])
    distance = np.concatenate([np.broadcast_to(np.asarray(item[2]), item[0].shape) for item in inner])
    explicit = np.repeat([item[3] for item in inner], [len(item[0]) for item in inner])
    delay = np.where(explicit, costs.latency[source], 0)
    if costs.lead is not None:
        delay -= np.where(explicit, costs.lead[target], 0)
    occupancy, meeting = _meetings(program, costs)
    tasks = tasks_of(program, costs, occupancy, meeting)
    late = _late_rows(costs, occupancy, meeting)
    if len(late):
        source, target, distance, delay = _with_ends(costs, late, source, target, distance, delay, explicit)
        none = np.zeros_like(late)
        occupancy = np.concatenate([occupancy, none])
        meetings = int(meeting.max(initial=NONE)) + 1
        meeting = np.concatenate([meeting, np.where(meeting[late] == NONE, NONE, meeting[late] + meetings)])
        tasks = replace(tasks, of_row=np.concatenate([tasks.of_row, np.full_like(late, NONE)]))
        prologue = np.concatenate([prologue, prologue[late]])
    # The prologue runs before everything, so that its edges hold in the first cycle whatever their distance.
    distance = np.where(prologue[source], 0, distance)
    now = distance == 0
    over = ~now & ~prologue[target]

    def graph(mask: Mask) -> CycleGraph:
        kept: Ints | slice = slice(None) if mask.all() else np.flatnonzero(mask)
        return CycleGraph(
            source=source[kept],
            target=target[kept],
            delay=delay[kept],
            occupancy=occupancy,
            meeting=meeting,
            tasks=tasks,
        )

    first_graph = graph(now)
    return _Unrolled(
        first=first_graph,
        later=graph(now & ~prologue[source] & ~prologue[target]) if prologue.any() else first_graph,
        late=late,
        carried=Edges(source=source[over], target=target[over], distance=distance[over]),
        carried_delay=delay[over],
        posted_after=host,
        posted_later=host_later,
    )


def _with_ends(
    costs: Costs, late: Ints, source: Ints, target: Ints, distance: Ints, delay: Ints, explicit: Mask
) -> tuple[Ints, Ints, Ints, Ints]:
    """(source, target, distance, delay) of the edges with a node more for the end of each late row.

    What waits for a late row waits for its end node, which waits for the row's occupancy, and for its rest
    after what the row waits for.
    """
    node = np.arange(len(costs.occupancy))
    node[late] = len(node) + np.arange(len(late))
    early = np.flatnonzero(explicit & (node[target] != target))
    after = costs.latency[source[early]]
    if costs.rest is not None:
        after = after + costs.rest[target[early]]
    none = np.zeros_like(late)
    return (
        np.concatenate([node[source], node[source[early]], late]),
        np.concatenate([target, node[target[early]], node[late]]),
        np.concatenate([distance, distance[early], none]),
        np.concatenate([delay, after, none]),
    )


def _late_rows(costs: Costs, occupancy: Ints, meeting: Ints) -> Ints:
    """Rows that may have to wait for their rest when their occupancy has passed, and those that meet them."""
    if costs.lead is None or costs.rest is None:
        return np.zeros(0, dtype=np.int64)
    late = (costs.lead > 0) & (costs.lead + costs.rest > occupancy)
    together = late & (meeting != NONE)
    return np.flatnonzero(late | np.isin(meeting, meeting[together]))


def _host_edges(program: Program, costs: Costs) -> tuple[Ints, Mask, Mask]:
    """The computation before each row of a synchronous rank, whether it is of the cycle before, and which
    rows must be told: those of the compute stream wait in their queue anyway."""
    columns = program.columns
    if not costs.synchronous.any():
        nothing = np.zeros(len(program), dtype=np.bool_)
        return np.full(len(program), NONE, dtype=np.int64), nothing, nothing
    computes = is_compute(columns.kind)
    rows = np.arange(len(program), dtype=np.int64)
    before = np.maximum.accumulate(np.where(computes, rows, NONE))
    before = np.concatenate([[NONE], before[:-1]]) if len(rows) else before
    # A rank's prologue comes first and is not followed by itself.
    body = columns.iteration != NONE
    part = 2 * columns.rank + body
    began = np.maximum.accumulate(np.where(np.diff(part, prepend=NONE) != 0, rows, 0))
    before = np.where(before >= began, before, NONE)
    last = np.full(program.ranks, NONE, dtype=np.int64)
    last[columns.rank[computes & body]] = rows[computes & body]
    later = body & (before == NONE)
    before = np.where(later, last[columns.rank], before)
    before = np.where(costs.synchronous[columns.rank], before, NONE)
    return before, later & (before != NONE), (before != NONE) & ~computes


def _meetings(program: Program, costs: Costs) -> tuple[Ints, Ints]:
    """Occupancies, with the longest of a meeting's members for all of them, and the meeting of each row.

    Members of a collective meet, and tensor ranks in a computation that all-reduces among them.
    """
    columns = program.columns
    rows = np.flatnonzero(is_collective(columns.kind))
    together = [(rows, collective_codes(program, rows))]
    if any(len(ranks) > 1 for ranks in program.obligations.owners.values()):
        rows = np.flatnonzero(np.array([kind.tensor_reduced for kind in KINDS])[columns.kind])
        names = ("kind", "stage", "iteration", "replica", "micro_batch")
        together.append((rows, codes(*(getattr(columns, name)[rows] for name in names))))
    meeting = np.full(len(program), NONE, dtype=np.int64)
    occupancy = costs.occupancy.copy()
    meetings = 0
    for rows, key in together:
        distinct, members = np.unique(key, return_inverse=True)
        longest = np.zeros(len(distinct), dtype=np.int64)
        np.maximum.at(longest, members, costs.occupancy[rows])
        occupancy[rows] = longest[members]
        meeting[rows] = meetings + members
        meetings += len(distinct)
    return occupancy, meeting


def _release(unrolled: _Unrolled, ends: list[Ints]) -> Ints:
    """When the next cycle's instructions may start, as far as earlier cycles decide it."""
    release = np.zeros(len(unrolled.first), dtype=np.int64)
    carried = unrolled.carried
    for distance in np.unique(carried.distance[carried.distance <= len(ends)]):
        mine = carried.distance == distance
        ready = ends[-distance][carried.source[mine]] + unrolled.carried_delay[mine]
        np.maximum.at(release, carried.target[mine], ready)
    return release


def _posted(unrolled: _Unrolled, ends: list[Ints], period: float | None) -> Ints:
    """When the host reached each instruction of the last cycle; 0 on asynchronous ranks.

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
    # Rows are in order of rank already, and mostly of one step: to put millions in order takes its time.
    order: Ints | slice = slice(None)
    if (np.diff(columns.iteration) < 0).any():
        order = np.argsort(columns.iteration, kind="stable")
    origin = start.min(initial=np.iinfo(np.int64).max)

    def nanoseconds(ticks: Ints) -> Ints:
        ticks = np.maximum(ticks, origin)[order] - origin
        return ticks if costs.tick_s == 1e-9 else np.rint(ticks * (costs.tick_s / 1e-9)).astype(np.int64)

    return Timeline(
        run=run,
        plan_id=plan_id,
        clock="predicted",
        step=columns.iteration[order],
        id=program.ids[order],
        position=np.arange(len(program), dtype=np.int64)[order],
        kind=columns.kind[order],
        stage=columns.stage[order],
        micro_batch=columns.micro_batch[order],
        rank=columns.rank[order],
        stream=program.stream[order],
        group=columns.group[order],
        bytes=columns.bytes[order],
        posted_ns=nanoseconds(posted),
        start_ns=nanoseconds(start),
        end_ns=nanoseconds(end),
    )


def _stuck(program: Program, unrolled: _Unrolled, graph: CycleGraph, left: Ints) -> Violation:
    """The circle of instructions that wait for each other."""
    before = np.full(len(left), NONE, dtype=np.int64)
    blocked = left[graph.source] > 0
    before[graph.target[blocked]] = graph.source[blocked]
    # A member of a collective that has come waits for one that has not.
    meeting = graph.meeting
    for row in np.flatnonzero((left > 0) & (before == NONE)).tolist():
        absent = np.flatnonzero((meeting == meeting[row]) & (before != NONE))
        before[row] = absent[0]
    seen: dict[int, int] = {}
    row = int(np.flatnonzero(left)[0])
    while row not in seen:
        seen[row] = len(seen)
        row = int(before[row])
    # The end of a late row is that row to its readers.
    row_of = np.concatenate([np.arange(len(program)), unrolled.late])
    circle = list(dict.fromkeys(int(row_of[node]) for node, turn in seen.items() if turn >= seen[row]))[::-1]
    words = [f"rank {int(program.columns.rank[p])} {program.instruction(p)}" for p in circle[:STUCK_SHOWN]]
    more = f" and {len(circle) - STUCK_SHOWN} more" if len(circle) > STUCK_SHOWN else ""
    return Violation("program", f"instructions wait for each other: {' -> '.join(words)}{more}")
