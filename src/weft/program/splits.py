"""Numbers of micro-batches, where stages split those of the batch into several of their own.

A stage that splits in s runs micro-batch m of the batch as its own m * s to m * s + s - 1. What crosses
between two stages is numbered by the one that splits more: a whole micro-batch of that one, a part of one of
the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.program.arrays import Ints
from weft.program.codes import numbered
from weft.program.kinds import MESSAGES, is_any_of
from weft.program.program import NONE, Columns
from weft.program.schedules.base import ComputeOrder


class Crossings(NamedTuple):
    """What crosses the edges of a stage graph in a step, edge by edge, each in the order of the samples.

    Attributes:
        edge: index of the edge. number: the micro-batch that crosses.
        producer, consumer: the micro-batches of both stages that have it.
    """

    edge: Ints
    number: Ints
    producer: Ints
    consumer: Ints


def crossings(splits: Ints, edges: Ints, micro_batches: int) -> Crossings:
    """All that crosses; `splits` of all stages, `edges` of shape (edges, 2), `micro_batches` of the batch."""
    here, there = splits[edges[:, 0]], splits[edges[:, 1]]
    finer = np.maximum(here, there)
    edge, number = numbered(finer * micro_batches)
    return Crossings(edge, number, *(number // (finer // own)[edge] for own in (here, there)))


def split_order(order: ComputeOrder, splits: Ints) -> ComputeOrder:
    """Return the order in which stages compute each micro-batch of the batch as several of their own."""
    if (splits == 1).all():
        return order
    row, within = numbered(splits[order.stage])
    kind, stage, micro_batch = (column[row] for column in order)
    return ComputeOrder(kind, stage, micro_batch * splits[stage] + within)


def per_micro_batch(columns: Columns, splits: Ints) -> Ints:
    """How many numbers each row's micro-batches have for one of the batch; shape (rows,)."""
    own = splits[np.maximum(columns.stage, 0)]
    if (splits == 1).all():
        return own
    between = is_any_of(columns.kind, [kind for pair in MESSAGES for kind in pair])
    other = splits[np.where(columns.part == NONE, 0, np.minimum(columns.part, len(splits) - 1))]
    return np.where(between, np.maximum(own, other), own)
