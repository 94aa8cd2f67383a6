"""All constraints of a Program's cycle as edges, inside the cycle and into the next.

An instruction waits for its queue and for its edges' sources. On a synchronous rank it also waits for the
last computation that its host issues before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weft.predict.costs import Costs
from weft.predict.engine import CycleGraph
from weft.predict.tasks import tasks_of
from weft.program.arrays import Ints, Mask
from weft.program.checks.messages import collective_codes
from weft.program.codes import codes
from weft.program.kinds import KINDS, is_collective, is_compute
from weft.program.program import NONE, Edges, Program


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """A cycle's inner edges, and the edges across cycles, which give its release times.

    `first` differs from `later` only by the prologue. `posted_after` is a computation: after its end, the
    host of a synchronous rank reaches the row. The computation is in the same cycle or, if `posted_later`, in
    the one before. The rows `late` have end nodes of their own, in their order after all rows.
    """

    first: CycleGraph
    later: CycleGraph
    late: Ints
    carried: Edges
    carried_delay: Ints
    posted_after: Ints
    posted_later: Mask


def unroll(program: Program, costs: Costs) -> Unrolled:
    """Return every constraint as an edge: the program's own, queue order, and hosts of synchronous ranks."""
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
    # In a steady cycle a queue continues from the end of the cycle before; the prologue does not repeat.
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
    # The prologue runs before everything, so its edges hold in the first cycle at any distance.
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
    return Unrolled(
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
    """Return (source, target, distance, delay) of the edges, with an end node for each late row.

    The followers of a late row wait for its end node. That node waits for the row's occupancy, and for its
    rest after the row's inputs.
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
    """Return rows that may wait for their rest after their occupancy, and the rows that meet them."""
    if costs.lead is None or costs.rest is None:
        return np.zeros(0, dtype=np.int64)
    late = (costs.lead > 0) & (costs.lead + costs.rest > occupancy)
    together = late & (meeting != NONE)
    if together.any():
        late = late | np.isin(meeting, meeting[together])
    return np.flatnonzero(late)


def _host_edges(program: Program, costs: Costs) -> tuple[Ints, Mask, Mask]:
    """Return the computation before each row of a synchronous rank, and two masks.

    The first marks computations of the cycle before. The second marks rows that need an edge: rows of the
    compute stream wait in their queue anyway.
    """
    columns = program.columns
    if not costs.synchronous.any():
        nothing = np.zeros(len(program), dtype=np.bool_)
        return np.full(len(program), NONE, dtype=np.int64), nothing, nothing
    computes = is_compute(columns.kind)
    rows = np.arange(len(program), dtype=np.int64)
    before = np.maximum.accumulate(np.where(computes, rows, NONE))
    before = np.concatenate([[NONE], before[:-1]]) if len(rows) else before
    # A rank's prologue comes first and does not repeat.
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
    """Return occupancies, with a meeting's longest for all its members, and the meeting of each row.

    Members of a collective meet. So do tensor ranks in a computation with an all-reduce among them.
    """
    columns = program.columns
    rows = np.flatnonzero(is_collective(columns.kind))
    together = [(rows, collective_codes(program, rows))]
    if any(len(ranks) > 1 for ranks in program.obligations.owners.values()):
        rows = np.flatnonzero(np.array([kind.tensor_reduced for kind in KINDS])[columns.kind])
        names = ("kind", "stage", "iteration", "replica", "micro_batch", "part")
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
