"""The norms of a step's micro-batches, combined by all training ranks after the last backward pass.

Every rank adds up the squares of its part of each micro-batch's gradient while it computes. One meeting per
step adds up the squares of all stages, replicas and ranks. No step waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.methods.micro_batch_norms.kinds import MICRO_BATCH_NORMS, TellsNorms
from weft.program.kinds import MAKES_GRADIENTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges

NAME = "micro-batch-norms"

# One fp64 number per micro-batch: a sum of squares.
SQUARE_BYTES = 8


def options(plan: Plan, graph: LayerGraph) -> bool | None:
    return plan.method(NAME) is not None or None


def refuse(layout: PipelineLayout, options: bool, others: Mapping[str, Any]) -> list[Violation]:
    found = []
    if "tying" in others:
        problem = "stages with copies of one weight see parts of its gradient, of which no square adds up"
        found.append(Violation(NAME, f"{problem}; leave report.micro_batch_norms out, or train with pp 1"))
    if (layout.splits > 1).any():
        problem = "stages that split micro-batches see gradients of parts; leave report.micro_batch_norms out"
        found.append(Violation(NAME, problem))
    return found


def tell_norms(pipeline: LoweredPipeline, layout: PipelineLayout, options: bool) -> LoweredPipeline:
    """Add one row on every device that steps, issued before its first step, which does not wait for it.

    The row has the coordinates of the device's first stage to step, because ids are made of coordinates.
    """
    columns = pipeline.columns
    steps = np.flatnonzero(columns.kind == STEP)
    devices, first = np.unique(columns.rank[steps], return_index=True)
    anchors = steps[first]
    makers = np.flatnonzero(is_any_of(columns.kind, MAKES_GRADIENTS))
    # A device's computations run one after the other, so its last computation stands for all.
    last = makers[np.searchsorted(columns.rank[makers], devices, side="right") - 1]
    added = Columns.of(
        len(devices),
        kind=MICRO_BATCH_NORMS,
        stage=columns.stage[anchors],
        replica=columns.replica[anchors],
        rank=devices,
        bytes=SQUARE_BYTES * sum(layout.micro_batches),
    )
    edges = Edges.of(last, len(columns) + np.arange(len(devices), dtype=np.int64))
    return insert(pipeline, added, anchors, np.full(len(anchors), -1, dtype=np.int64), edges)


def groups(layout: PipelineLayout, options: bool) -> tuple[GroupTable, ...]:
    """Return one group: all ranks that hold a trained stage, rising."""
    trained = layout.stages[layout.frozen_stages :]
    ranks = tuple(sorted({rank for stage in trained for ranks in stage.replicas for rank in ranks}))
    table = np.zeros(len(layout.stages[0].replicas[0]), dtype=np.int64)
    return (GroupTable(kinds=(MICRO_BATCH_NORMS,), groups=(ranks,), by=(), table=table),)


PASS = Pass(
    name=NAME,
    options=options,
    apply=tell_norms,
    last=True,
    refuse=refuse,
    groups=groups,
    owes=lambda layout, options: TellsNorms(),
)
