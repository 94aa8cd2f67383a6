"""K-FAC in a program: its work in each window of a stage, and the use of inverses in every step.

Martens and Grosse, arXiv 1503.05671, with the empirical Fisher matrix. Each linear layer has a factor of its
inputs, and one of the gradients of its outputs. A step multiplies the gradient of the weight by the inverses
of both, before any norm of it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.methods.bubble_filling.work import PassName
from weft.methods.bubble_filling.works import BubbleWork, WorkRows
from weft.methods.kfac.kinds import (
    CURVATURES,
    INVERSIONS,
    PRECONDITION,
    PRECONDITION_SHARDS,
    REDUCTIONS,
    Preconditions,
)
from weft.methods.kfac.linears import FACTORS, Treated, read_treated
from weft.methods.kfac.options import NAME, options_of
from weft.methods.sharding.groups import group_tables
from weft.methods.sharding.meeting import outsiders
from weft.predict.cost.memory import STEPPED_BYTES
from weft.program.kinds import KINDS, STEP
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, stage_groups
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges

# The passes whose tensors each side needs.
PASSES: tuple[PassName, PassName] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class TreatedStages:
    """The linear layers that a plan treats.

    Attributes:
        layers: by stage.
        sharers: the replicas that share a stage's gradient; 1: each has the whole.
        largest: by stage, the bytes of a rank's gradient of its largest weight.
        tensor: the tensor ranks of each replica.
    """

    layers: tuple[Treated, ...]
    sharers: int
    largest: tuple[int, ...]
    tensor: int


def options(plan: Plan, graph: LayerGraph) -> TreatedStages | None:
    found = options_of(plan)
    if found is None:
        return None
    treated, element = read_treated(found.linears), STEPPED_BYTES[plan.precision]
    layers = tuple(
        {layer: treated[layer] for layer in stage.layers if layer in treated} for stage in plan.stages
    )
    sizes = (
        [size for layer in some.values() for one in layer.operands for size in one.weights] for some in layers
    )
    tensor = plan.grid(0).tensor
    largest = tuple(element * (max(each, default=0) // tensor) for each in sizes)
    return TreatedStages(layers, plan.sharers(0), largest, tensor)


def factor_bytes(sizes: Sequence[int], element: int) -> int:
    """Return the bytes of symmetric matrices of these sizes, one half of each."""
    return sum(size * (size + 1) // 2 for size in sizes) * element


def items(plan: Plan, graph: LayerGraph, stage: int) -> list[WorkRows]:
    """Return the work of a stage: curvature of micro-batches, sums over its ranks, and inverses."""
    found = options(plan, graph)
    assert found is not None, "a plan with this work has its options"
    treated, element = found.layers[stage], STEPPED_BYTES[plan.precision]
    together = len(plan.stages[stage].replicas) * found.tensor > 1
    rows: list[WorkRows] = []
    of: dict[tuple[int, int], int] = {}

    def add(row: WorkRows) -> None:
        of[row.kind, row.part] = len(rows)
        rows.append(row)

    # The order of the published lists: curvature of all layers, then sums, then inverses.
    for curvature, follows in zip(CURVATURES, PASSES, strict=True):
        for layer in treated:
            add(WorkRows(kind=curvature, part=layer, by_micro_batch=True, follows=follows))
    for side, reduce in enumerate(REDUCTIONS if together else ()):
        for layer, linears in treated.items():
            size = factor_bytes(linears.sizes(side), element)
            add(WorkRows(kind=reduce, part=layer, after=(of[CURVATURES[side], layer],), bytes=size))
    for side, invert in enumerate(INVERSIONS):
        # The damping needs the means of both sides; those of one rank alone differ from those of all.
        # Curvature of the next window goes to the same sums, so it waits, too.
        before = (*CURVATURES, *REDUCTIONS) if together else (CURVATURES[side],)
        for layer, linears in treated.items():
            for number in range(len(linears.sizes(side))):
                part = layer * FACTORS + number
                add(WorkRows(kind=invert, part=part, after=tuple(of[one, layer] for one in before)))
    return rows


def _every(plan: Plan) -> int | None:
    found = options_of(plan)
    return None if found is None else found.every


WORK = BubbleWork(method=NAME, every=_every, items=items)


def refuse(layout: PipelineLayout, treated: TreatedStages, others: Mapping[str, Any]) -> list[Violation]:
    found = []
    if len(layout.stages[0].replicas[0]) > treated.tensor:
        problem = "context and expert ranks have parts of a layer's tokens"
        found.append(Violation(NAME, problem, "cp 1 and ep 1"))
    if layout.frozen_stages:
        found.append(Violation(NAME, "frozen stages have no gradients", "trained stages"))
    return found


def precondition(
    pipeline: LoweredPipeline, layout: PipelineLayout, treated: TreatedStages
) -> LoweredPipeline:
    """Add one row before each stage's step, and before the norm of the gradient."""
    columns, edges = pipeline.columns, pipeline.edges
    has_layers = np.array([bool(one) for one in treated.layers])
    steps = np.flatnonzero((columns.kind == STEP) & has_layers[columns.stage])
    norms = np.flatnonzero(columns.kind == KINDS.code("norm"))
    norm_of = np.full(int(columns.rank.max(initial=0)) + 1, -1, dtype=np.int64)
    norm_of[columns.rank[norms]] = norms
    rows = len(columns) + np.arange(len(steps), dtype=np.int64)
    row_of = np.full(len(columns), -1, dtype=np.int64)
    row_of[steps] = rows
    normed = norm_of[columns.rank[steps]] >= 0
    anchors = np.where(normed, norm_of[columns.rank[steps]], steps)
    into = (row_of[edges.target] >= 0) & (columns.kind[edges.source] != KINDS.code("norm"))
    follows = Edges(
        source=edges.source[into], target=row_of[edges.target[into]], distance=edges.distance[into]
    )
    shared = treated.sharers > 1
    # A piece goes to the rank that multiplies it, and comes back.
    sizes = 2 * np.array(treated.largest, dtype=np.int64)[columns.stage[steps]]
    added = Columns.of(
        len(steps),
        kind=PRECONDITION_SHARDS if shared else PRECONDITION,
        bytes=sizes if shared else 0,
        **{name: getattr(columns, name)[steps] for name in ("stage", "replica", "rank")},
    )
    new = [follows, Edges.of(rows, steps), Edges.of(rows[normed], anchors[normed])]
    return insert(pipeline, added, anchors, rows - len(columns) - len(steps), Edges.join(new))


def groups(layout: PipelineLayout, treated: TreatedStages) -> tuple[GroupTable, ...]:
    """Return the groups of all ranks of a stage, and of those that share its gradient."""
    if layout.replicas * treated.tensor == 1:
        return ()
    found = (stage_groups(REDUCTIONS, layout),)
    if treated.sharers == 1:
        return found
    shared, _ = group_tables(layout, treated.sharers)
    return (*found, replace(shared, kinds=(PRECONDITION_SHARDS,)))


def owes(layout: PipelineLayout, treated: TreatedStages) -> Preconditions:
    layers = (
        {layer: (len(one.sizes(0)), len(one.sizes(1))) for layer, one in some.items()}
        for some in treated.layers
    )
    return Preconditions(layers=tuple(layers))


PASS = Pass(
    name=NAME,
    options=options,
    apply=precondition,
    after=("sharding", "tying", "blocking", "gradient-norm"),
    refuse=refuse,
    groups=groups,
    owes=owes,
    check=lambda program, owed: outsiders(program, PRECONDITION_SHARDS, "K-FAC"),
)
