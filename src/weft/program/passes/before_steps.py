"""Insertion of instructions that run the first parts of steps."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import STEP
from weft.program.lower import LoweredPipeline
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges


def before_steps(pipeline: LoweredPipeline, kind: int, sizes: Ints, *, used_up_by: int) -> LoweredPipeline:
    """Return the pipeline with parts of one kind before each step; the first follows all that it follows.

    Args:
        sizes: the bytes that each part sends, shape (stages, parts).
        used_up_by: the kind of instructions that follow a step and must then follow the first part, too.
    """
    columns, edges = pipeline.columns, pipeline.edges
    steps, parts = np.flatnonzero(columns.kind == STEP), sizes.shape[1]
    rows = len(columns) + np.arange(len(steps) * parts, dtype=np.int64).reshape(len(steps), parts)
    row_of = np.full(len(columns), -1, dtype=np.int64)
    row_of[steps] = np.arange(len(steps), dtype=np.int64)
    into = row_of[edges.target] >= 0
    anchors, part = np.repeat(steps, parts), np.tile(np.arange(parts, dtype=np.int64), len(steps))
    added = Columns.of(
        rows.size,
        kind=kind,
        stage=columns.stage[anchors],
        replica=columns.replica[anchors],
        part=part,
        rank=columns.rank[anchors],
        bytes=sizes[columns.stage[anchors], part],
    )
    follows = Edges(
        source=edges.source[into],
        target=rows[row_of[edges.target[into]], 0],
        distance=edges.distance[into],
    )
    in_turn = Edges.of(rows[:, :-1].ravel(), rows[:, 1:].ravel())
    # Gradients are cleared, and states stored, when all parts have read them.
    stores = (row_of[edges.source] >= 0) & (columns.kind[edges.target] == used_up_by)
    used_up = Edges(
        source=rows[row_of[edges.source[stores]], 0],
        target=edges.target[stores],
        distance=edges.distance[stores],
    )
    new = Edges.join([follows, in_turn, Edges.of(rows.ravel(), anchors), used_up])
    return insert(pipeline, added, anchors, part - parts, new)
