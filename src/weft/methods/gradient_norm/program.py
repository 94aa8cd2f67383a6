"""The norm of the whole gradient, taken by all ranks before any of them steps.

Clipping by the norm (Pascanu et al., arXiv 1211.5063) needs the gradients of all stages. So does a training
that skips steps with gradients that are not finite. After its last reduction, every training rank adds up its
own squares and exchanges one number with all others. Only then it steps: one more meeting per step.
"""

from __future__ import annotations

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.gradient_norm.kinds import NORM, TakesNorm
from weft.program.kinds import KINDS, MAKES_GRADIENTS, STEP, is_any_of, kinds_writing
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges

NAME = "gradient-norm"

# One fp64 number: the sum of squares of a rank's part of the gradient.
NORM_BYTES = 8


def options(plan: Plan, graph: LayerGraph) -> bool | None:
    return plan.method(NAME) is not None or None


def take_norm(pipeline: LoweredPipeline, layout: PipelineLayout, options: bool) -> LoweredPipeline:
    """Add the norm to one pipeline: one row on every device that steps, before its first step.

    The row has the coordinates of the device's first stage to step, because ids are made of coordinates.
    """
    columns = pipeline.columns
    steps = np.flatnonzero(columns.kind == STEP)
    devices, first = np.unique(columns.rank[steps], return_index=True)
    anchors = steps[first]
    norms = len(columns) + np.arange(len(devices), dtype=np.int64)
    norm_of = np.full(int(columns.rank.max(initial=0)) + 1, -1, dtype=np.int64)
    norm_of[devices] = norms
    read = {choice.value for read in KINDS[NORM].all_reads for choice in read.choices}
    reduced = np.flatnonzero(is_any_of(columns.kind, kinds_writing(*read - {"weight_gradient"})))
    makers = np.flatnonzero(is_any_of(columns.kind, MAKES_GRADIENTS))
    # A device's computations run one after the other, so its last computation stands for all.
    last = makers[np.searchsorted(columns.rank[makers], devices, side="right") - 1]
    awaited = np.concatenate([reduced, last])
    added = Columns.of(
        len(devices),
        kind=NORM,
        stage=columns.stage[anchors],
        replica=columns.replica[anchors],
        rank=devices,
        bytes=NORM_BYTES,
    )
    edges = Edges.join(
        [
            Edges.of(awaited, norm_of[columns.rank[awaited]]),
            Edges.of(norm_of[columns.rank[steps]], steps),
        ]
    )
    return insert(pipeline, added, anchors, np.full(len(anchors), -1, dtype=np.int64), edges)


def groups(layout: PipelineLayout, options: bool) -> tuple[GroupTable, ...]:
    """Return one group: all ranks that hold a trained stage, rising."""
    trained = layout.stages[layout.frozen_stages :]
    ranks = tuple(sorted({rank for stage in trained for ranks in stage.replicas for rank in ranks}))
    table = np.zeros(len(layout.stages[0].replicas[0]), dtype=np.int64)
    return (GroupTable(kinds=(NORM,), groups=(ranks,), by=(), table=table),)


PASS = Pass(
    name=NAME,
    options=options,
    apply=take_norm,
    after=("sharding", "tying", "blocking"),
    groups=groups,
    owes=lambda layout, options: TakesNorm(),
)
