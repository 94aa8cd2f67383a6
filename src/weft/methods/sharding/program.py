"""The shards of a stage's replicas, and the gathers, frees and reductions of sharding.

Level of ZeRO (Rajbhandari et al., arXiv 1910.02054):

* zero-0: every replica holds everything; gradients are all-reduced after the last backward of a stage.
* zero-1: optimizer states are sharded, so that a replica steps its shard of a stage's weights. Gradients are
  reduce-scattered. Stepped weights are gathered as the next step begins, in the order of their first use.
* zero-2: gradients are sharded, too. A device accumulates into few buffers, and reduces a buffer before
  another stage takes it.
* zero-3: weights are sharded, too. A device gathers them into few buffers when a stage needs them.

In islands, replicas shard only among their own island, and every island holds all shards. The last reduction
of a stage has added up its gradient inside each island. Then the ranks with the same shard in all islands add
it up. They do so once per step, after any number of reductions (Zhao et al., PyTorch FSDP, arXiv 2304.11277,
section 3.2; Zhang et al., MiCS, arXiv 2205.00119).

The buffer rule of `weft.program.buffers` places gathers and reductions. A device has one queue of
collectives, in the order in which computations wait for them. At one place, gathers precede reductions
(Lamy-Poirier, arXiv 2211.05953, section 4.2; Jiang et al., MegaScale, arXiv 2402.15627, section 3.2). The
first gather is issued before anything else, so that it overlaps the loading of the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, Sharding
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import Violation
from weft.methods.sharding.groups import group_tables
from weft.methods.sharding.kinds import FREE, GATHER, REDUCE, REDUCE_ACROSS, SharesOut
from weft.methods.sharding.verify import check_sharding
from weft.program.arrays import Ints
from weft.program.buffers import SHARDED_BUFFERS, BufferEvent, gathers, reductions
from weft.program.kinds import COMPUTATIONS, FORWARD, KINDS, MAKES_GRADIENTS, READS_WEIGHTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.insert import after_sends, insert, without_edges
from weft.program.program import Columns, Edges
from weft.program.schedules.base import ComputeOrder

NAME = "sharding"
STEPS_APART = "replicas that step by themselves share nothing out"

_FREE, _GATHER, _REDUCE, _REDUCE_ACROSS = range(1, 5)


@dataclass(frozen=True, slots=True)
class Shared:
    """The sharding of replicas, and the replicas of an island; None: all of them.

    `local`: replicas share nothing, not even the sum of their gradients.
    """

    level: Sharding = "zero-0"
    island: int | None = None
    local: bool = False

    def sharers(self, layout: PipelineLayout) -> int:
        """Return the number of replicas that shard a whole stage among themselves."""
        return self.island or layout.replicas


def options(plan: Plan, graph: LayerGraph) -> Shared:
    return Shared(plan.sharding, plan.island, keeps_gradients_local(plan.sync))


def refuse(layout: PipelineLayout, shared: Shared, others: Mapping[str, Any]) -> list[Violation]:
    """Refuse islands that are not whole or shard nothing, and sharding replicas that step by themselves."""
    island, replicas = shared.island, layout.replicas
    if shared.local and shared.level != "zero-0":
        return [Violation("sharding", f"{shared.level}: {STEPS_APART}", "zero-0")]
    if layout.deals and shared.level != "zero-0":
        counts = "+".join(str(len(stage.replicas)) for stage in layout.stages)
        return [
            Violation(
                "sharding",
                f"{shared.level} needs equally many replicas of every stage, not {counts}",
                "zero-0",
            )
        ]
    if layout.mixes_replicas and (shared.level in ("zero-2", "zero-3") or island is not None):
        words = shared.level if island is None else f"{shared.level} in islands"
        problem = f"{words} needs replicas of equally many ranks"
        return [Violation("sharding", problem, "zero-1")]
    if island is None:
        return []
    if island < 1 or replicas % island:
        return [Violation("layout", f"{replicas} replicas cannot make whole islands of {island}")]
    if shared.level == "zero-0":
        return [Violation("layout", "zero-0 shares nothing out in islands", "zero-1")]
    return []


def owes(layout: PipelineLayout, shared: Shared) -> SharesOut | None:
    if shared.level == "zero-0" or layout.replicas == 1:
        return None
    return SharesOut(level=shared.level, islands=layout.replicas // shared.sharers(layout))


def shard(pipeline: LoweredPipeline, layout: PipelineLayout, shared: Shared) -> LoweredPipeline:
    """Add the collectives of the replicas to one pipeline, if it has several replicas."""
    if layout.replicas == 1 or shared.local:
        return pipeline
    sharding, sharers = shared.level, shared.sharers(layout)
    columns = pipeline.columns
    added = _Added()
    # A stage of one replica, among stages of several, steps by its own gradient.
    alone = [stage for stage, one in enumerate(layout.stages) if len(one.replicas) == 1]
    steps = {
        (int(columns.rank[row]), int(columns.stage[row])): int(row)
        for row in np.flatnonzero((columns.kind == STEP) & ~np.isin(columns.stage, alone))
    }
    starts = np.searchsorted(columns.rank, np.arange(int(columns.rank.max(initial=-1)) + 2)).tolist()
    for device, (start, end) in enumerate(pairwise(starts)):
        mine = start + np.flatnonzero(is_any_of(columns.kind[start:end], COMPUTATIONS))
        order = ComputeOrder(columns.kind[mine], columns.stage[mine], columns.micro_batch[mine])
        one = _Device(start, mine, order, {stage: row for (on, stage), row in steps.items() if on == device})
        if sharding == "zero-3":
            _gather_into_buffers(one, added)
        elif sharding != "zero-0":
            _gather_at_start(one, added)
        if one.steps:
            buffers = SHARDED_BUFFERS if sharding in ("zero-2", "zero-3") else len(one.steps)
            _reduce(one, buffers, added, across=sharers < layout.replicas)
    return _put_in(pipeline, layout, added, sharers)


@dataclass(frozen=True, slots=True)
class _Device:
    """One device's computations: first row, rows in order, their kinds, and the step of each stage."""

    first_row: int
    rows: Ints
    order: ComputeOrder
    steps: dict[int, int]


@dataclass(slots=True)
class _Added:
    """New rows (kind, stage, part, anchor, turn) and edges (source, target, distance).

    In edges, new row i is -1 - i until the rows are inserted.
    """

    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)

    def row(self, kind: int, stage: int, part: int, anchor: int, turn: int) -> int:
        self.rows.append((kind, stage, part, anchor, turn))
        return -len(self.rows)

    def edge(self, source: int, target: int, distance: int = 0) -> None:
        self.edges.append((source, target, distance))


def _gather_at_start(device: _Device, added: _Added) -> None:
    """Gather every stage that a step has changed, in the order of first use."""
    events = gathers(device.order, max(1, len(set(device.order.stage.tolist()))))
    for turn, event in enumerate(events):
        if device.steps and event.stage not in device.steps:
            continue
        row = added.row(GATHER, event.stage, 0, device.first_row, turn - len(events))
        added.edge(row, int(device.rows[event.before]))
        if event.stage in device.steps:
            added.edge(device.steps[event.stage], row, 1)


def _gather_into_buffers(device: _Device, added: _Added) -> None:
    """Gather wherever a buffer's content changes, as soon as the buffer is free of its former content."""
    order = device.order
    events = gathers(order, SHARDED_BUFFERS)
    local = {stage: index for index, stage in enumerate(sorted(set(order.stage.tolist())))}
    held: dict[int, int] = {}
    first: dict[int, int] = {}
    for turn, event in enumerate(events):
        buffer = local[event.stage] % SHARDED_BUFFERS
        if event.after < 0:
            row = added.row(GATHER, event.stage, event.part, device.first_row, turn - len(events))
            first[buffer] = row
        else:
            anchor = int(device.rows[event.after])
            freed = added.row(FREE, *_content(events[held[buffer]]), anchor, _FREE)
            row = added.row(GATHER, event.stage, event.part, anchor, _GATHER)
            added.edge(freed, row)
        held[buffer] = turn
        added.edge(row, int(device.rows[event.before]))
        if event.stage in device.steps and event.part == 0:
            added.edge(device.steps[event.stage], row, 1)
    reads = np.flatnonzero(is_any_of(order.kind, READS_WEIGHTS)).tolist()
    last_use = {local[int(order.stage[place])] % SHARDED_BUFFERS: place for place in reads}
    for buffer, turn in held.items():
        freed = added.row(FREE, *_content(events[turn]), int(device.rows[last_use[buffer]]), _FREE)
        added.edge(freed, first[buffer], 1)


def _content(event: BufferEvent) -> tuple[int, int]:
    return event.stage, event.part


def _reduce(device: _Device, buffers: int, added: _Added, *, across: bool) -> None:
    """Reduce wherever a gradient buffer's content changes, and reduce the remaining buffers at the end.

    `across`: reduce once more after the last reduction of each stage, over the ranks with the same shard.
    """
    order, rows = device.order, device.rows
    makes = is_any_of(order.kind, MAKES_GRADIENTS)
    waiting = {
        stage: deque(np.flatnonzero(makes & (order.stage == stage)).tolist()) for stage in device.steps
    }
    reduced: dict[int, list[int]] = {stage: [] for stage in device.steps}
    last: dict[int, BufferEvent] = {}
    for event in reductions(order, buffers):
        row = added.row(REDUCE, event.stage, event.part, int(rows[event.after]), _REDUCE)
        makers = waiting[event.stage]
        while makers and makers[0] <= event.after:
            added.edge(int(rows[makers.popleft()]), row)
        if event.before < len(rows):
            added.edge(row, int(rows[event.before]))
        added.edge(row, device.steps[event.stage])
        reduced[event.stage].append(row)
        last[event.stage] = event
    for stage, event in last.items() if across else ():
        row = added.row(REDUCE_ACROSS, stage, 0, int(rows[event.after]), _REDUCE_ACROSS)
        for part in reduced[stage]:
            added.edge(part, row)
        added.edge(row, device.steps[stage])


def _put_in(
    pipeline: LoweredPipeline, layout: PipelineLayout, added: _Added, sharers: int
) -> LoweredPipeline:
    """Insert the rows; a gradient then reaches its step through a reduction only."""
    columns, edges = pipeline.columns, pipeline.edges
    kind, stage, part, anchor, turn = _table(added.rows, 5)
    source, target, distance = _table(added.edges, 3)
    payload = np.zeros((len(KINDS), len(layout.stages)), dtype=np.int64)
    payload[GATHER] = [one.weight_bytes for one in layout.stages]
    payload[REDUCE] = [one.gradient_bytes for one in layout.stages]
    payload[REDUCE_ACROSS] = [-(-one.gradient_bytes // sharers) for one in layout.stages]
    new = Columns.of(
        len(kind),
        kind=kind,
        stage=stage,
        part=part,
        rank=columns.rank[anchor],
        replica=_replicas(columns, columns.rank[anchor], stage, len(layout.stages)),
        bytes=payload[kind, stage],
    )
    makers = is_any_of(columns.kind[edges.source], MAKES_GRADIENTS)
    direct = makers & (columns.kind[edges.target] == STEP) & (edges.distance == 0)
    direct &= np.isin(columns.stage[edges.target], stage[kind == REDUCE])
    behind = turn > 0
    anchor = np.where(behind, after_sends(columns, anchor), anchor)
    present = len(columns)
    return insert(
        without_edges(pipeline, direct),
        new,
        anchor,
        turn,
        Edges(
            source=np.where(source < 0, present - 1 - source, source),
            target=np.where(target < 0, present - 1 - target, target),
            distance=distance,
        ),
    )


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    """Return the columns of the rows, shape (width, rows)."""
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def _replicas(columns: Columns, device: Ints, stage: Ints, stages: int) -> Ints:
    """Return the replica, or path, of each (device, stage)."""
    forwards = np.flatnonzero(columns.kind == FORWARD)
    known = np.full((int(columns.rank.max(initial=0)) + 1, stages), -1, dtype=np.int64)
    known[columns.rank[forwards], columns.stage[forwards]] = columns.replica[forwards]
    found: Ints = known[device, stage]
    return found


PASS = Pass(
    name=NAME,
    options=options,
    apply=shard,
    default=Shared(),
    evaluates=True,
    deals=True,
    mixes_lanes=True,
    mixes_replicas=True,
    refuse=refuse,
    groups=lambda layout, shared: group_tables(layout, shared.sharers(layout)),
    owes=owes,
    check=check_sharding,
)
