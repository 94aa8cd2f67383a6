"""K-FAC in a program: its work in each window of a stage, and the use of inverses in every step.

Martens and Grosse, arXiv 1503.05671, with the empirical Fisher matrix. Each linear layer has a factor of its
inputs, and one of the gradients of its outputs. A step multiplies the gradient of the weight by the inverses
of both, before any norm of it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.methods.bubble_filling.work import Pass as PassName
from weft.methods.bubble_filling.works import BubbleWork, WorkRows
from weft.methods.kfac.kinds import (
    FACTORS,
    INPUT_CURVATURE,
    INVERT_INPUT,
    INVERT_OUTPUT,
    OUTPUT_CURVATURE,
    PRECONDITION,
    REDUCE_INPUT,
    REDUCE_OUTPUT,
    Preconditions,
)
from weft.methods.kfac.options import NAME, Operand, options_of, read_operands
from weft.predict.cost.memory import STEPPED_BYTES
from weft.program.kinds import KINDS, STEP
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, replica_groups
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges


@dataclass(frozen=True, slots=True)
class Treated:
    """The linear layers of every block, and by stage the positions of its blocks in the model."""

    operands: tuple[Operand, ...]
    blocks: tuple[tuple[int, ...], ...]


def options(plan: Plan, graph: LayerGraph) -> Treated | None:
    found = options_of(plan)
    if found is None:
        return None
    blocks = tuple(
        tuple(layer for layer in stage.layers if graph.layers[layer].kind == "block") for stage in plan.stages
    )
    return Treated(read_operands(found.operands), blocks)


def factor_bytes(sizes: Sequence[int], element: int) -> int:
    """Return the bytes of symmetric matrices of these sizes, one half of each."""
    return sum(size * (size + 1) // 2 for size in sizes) * element


def items(plan: Plan, graph: LayerGraph, stage: int) -> list[WorkRows]:
    """Return the work of a stage: curvature of micro-batches, sums over replicas, and inverses."""
    treated = options(plan, graph)
    assert treated is not None, "a plan with this work has its options"
    replicas, element = len(plan.stages[stage].replicas), STEPPED_BYTES[plan.precision]
    sides: tuple[tuple[int, PassName, int, int, list[int]], ...] = (
        (INPUT_CURVATURE, "forward", REDUCE_INPUT, INVERT_INPUT, [one.inner for one in treated.operands]),
        (
            OUTPUT_CURVATURE,
            "backward",
            REDUCE_OUTPUT,
            INVERT_OUTPUT,
            [size for one in treated.operands for size in one.columns],
        ),
    )
    found: list[WorkRows] = []
    blocks, of = treated.blocks[stage], dict[tuple[int, int], int]()

    def add(row: WorkRows) -> None:
        of[row.kind, row.part] = len(found)
        found.append(row)

    # The order of the published lists: curvature of all layers, then sums, then inverses.
    for curvature, follows, *_ in sides:
        for block in blocks:
            add(WorkRows(kind=curvature, part=block, by_micro_batch=True, follows=follows))
    for curvature, _, reduce, _, sizes in sides if replicas > 1 else ():
        for block in blocks:
            size = factor_bytes(sizes, element)
            add(WorkRows(kind=reduce, part=block, after=(of[curvature, block],), bytes=size))
    for curvature, _, reduce, invert, sizes in sides:
        for block in blocks:
            before = of[reduce if replicas > 1 else curvature, block]
            for number in range(len(sizes)):
                add(WorkRows(kind=invert, part=block * FACTORS + number, after=(before,)))
    return found


def _every(plan: Plan) -> int | None:
    found = options_of(plan)
    return None if found is None else found.every


WORK = BubbleWork(method=NAME, every=_every, items=items)


def refuse(layout: PipelineLayout, treated: Treated, others: Mapping[str, Any]) -> list[Violation]:
    found = []
    if len(layout.stages[0].replicas[0]) > 1:
        problem = "tensor, context and expert ranks have parts of a layer's inputs"
        found.append(Violation(NAME, problem, "tp 1 and cp 1"))
    if layout.frozen_stages:
        found.append(Violation(NAME, "frozen stages have no gradients", "trained stages"))
    return found


def precondition(pipeline: LoweredPipeline, layout: PipelineLayout, treated: Treated) -> LoweredPipeline:
    """Add one row before each stage's step, and before the norm of the gradient."""
    columns, edges = pipeline.columns, pipeline.edges
    has_blocks = np.array([bool(blocks) for blocks in treated.blocks])
    steps = np.flatnonzero((columns.kind == STEP) & has_blocks[columns.stage])
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
    added = Columns.of(
        len(steps),
        kind=PRECONDITION,
        **{name: getattr(columns, name)[steps] for name in ("stage", "replica", "rank")},
    )
    new = [follows, Edges.of(rows, steps), Edges.of(rows[normed], anchors[normed])]
    return insert(pipeline, added, anchors, rows - len(columns) - len(steps), Edges.join(new))


def groups(layout: PipelineLayout, treated: Treated) -> tuple[GroupTable, ...]:
    """Return the groups of all replicas of a stage."""
    if layout.replicas == 1:
        return ()
    everybody = [list(range(layout.replicas))]
    kinds = (REDUCE_INPUT, REDUCE_OUTPUT)
    return (replica_groups(kinds, layout, [everybody] * len(layout.stages)),)


def owes(layout: PipelineLayout, treated: Treated) -> Preconditions:
    return Preconditions(
        blocks=treated.blocks,
        inputs=len(treated.operands),
        outputs=sum(len(one.columns) for one in treated.operands),
    )


PASS = Pass(
    name=NAME,
    options=options,
    apply=precondition,
    after=("sharding", "tying", "blocking", "gradient-norm"),
    refuse=refuse,
    groups=groups,
    owes=owes,
)
