"""Numbers of micro-batches, for stages that split each micro-batch of the batch into several of their own.

A stage with s splits runs micro-batch m of the batch as its own `m * s` to `m * s + s - 1`. Between two
stages, the stage with more splits numbers the crossings. A crossing is a whole micro-batch of this stage and
part of one of the other.
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
    """Micro-batches that cross the edges of a stage graph in a step, by edge, in the order of the samples.

    Attributes:
        edge: index of the edge. number: the micro-batch that crosses.
        producer, consumer: the micro-batches of both stages that contain it.
    """

    edge: Ints
    number: Ints
    producer: Ints
    consumer: Ints


def crossings(splits: Ints, edges: Ints, micro_batches: int) -> Crossings:
    """Return all crossings of a batch; `splits` are by stage, `edges` have shape (edges, 2)."""
    here, there = splits[edges[:, 0]], splits[edges[:, 1]]
    finer = np.maximum(here, there)
    edge, number = numbered(finer * micro_batches)
    return Crossings(edge, number, *(number // (finer // own)[edge] for own in (here, there)))


def split_order(order: ComputeOrder, splits: Ints) -> ComputeOrder:
    """Return the order with each micro-batch of the batch replaced by the stage's own ones."""
    if (splits == 1).all():
        return order
    row, within = numbered(splits[order.stage])
    kind, stage, micro_batch = (column[row] for column in order)
    return ComputeOrder(kind, stage, micro_batch * splits[stage] + within)


def per_micro_batch(columns: Columns, splits: Ints) -> Ints:
    """Return each row's number of micro-batches, or for messages of crossings, per one of the batch."""
    own = splits[np.maximum(columns.stage, 0)]
    if (splits == 1).all():
        return own
    between = is_any_of(columns.kind, [kind for pair in MESSAGES for kind in pair])
    other = splits[np.where(columns.part == NONE, 0, np.minimum(columns.part, len(splits) - 1))]
    return np.where(between, np.maximum(own, other), own)
