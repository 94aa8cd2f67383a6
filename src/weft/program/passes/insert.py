"""Insertion of rows into a lowered pipeline, at their position in the issue order of the host."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.kinds import is_send
from weft.program.lower import LoweredPipeline, renumber
from weft.program.program import Columns, Edges


def insert(
    pipeline: LoweredPipeline, columns: Columns, anchor: Ints, turn: Ints, edges: Edges
) -> LoweredPipeline:
    """Return the pipeline with further rows and edges.

    Args:
        columns: the new rows; `rank` is their device.
        anchor: for each new row, the adjacent row of the pipeline in issue order, on the same device.
        turn: negative before the anchor, positive after it; rows at one anchor are sorted by turn.
        edges: new edges; they refer to row i of `columns` as row `len(pipeline.columns) + i`.
    """
    present = len(pipeline.columns)
    place = np.concatenate([np.arange(present, dtype=np.int64), anchor])
    turns = np.concatenate([np.zeros(present, dtype=np.int64), turn])
    order = np.lexsort((turns, place))
    joined = Columns.join([pipeline.columns, columns]).take(order)
    return LoweredPipeline(joined, renumber(Edges.join([pipeline.edges, edges]), order))


def moved_behind(pipeline: LoweredPipeline, moved: Mask, anchor: Ints) -> LoweredPipeline:
    """Return the pipeline with some rows directly behind others, in their old order.

    Args:
        moved: the rows that move, (rows,).
        anchor: for each row, the row of its device that it moves behind, (rows,).
    """
    place = np.where(moved, anchor, np.arange(len(pipeline.columns), dtype=np.int64))
    order = np.lexsort((moved, place))
    return LoweredPipeline(pipeline.columns.take(order), renumber(pipeline.edges, order))


def without_edges(pipeline: LoweredPipeline, dropped: Mask) -> LoweredPipeline:
    """Return the pipeline without the edges of the mask, shape (edges,)."""
    return LoweredPipeline(pipeline.columns, pipeline.edges.take(~dropped))


def after_sends(columns: Columns, rows: Ints) -> Ints:
    """Return the last send that directly follows each of `rows`, or the row itself if there is none.

    A row that is issued next to it comes after the messages that others wait for.
    """
    sends = is_send(columns.kind)
    others = np.flatnonzero(~sends)
    following = np.append(others, len(columns))[np.searchsorted(others, rows, side="right")]
    return following - 1
