"""Interleaving of two consecutive passes, so that collectives of one overlap with the other.

Two micro-batches are then in flight at once (as in Domino, arXiv 2409.15241, and DeepSeek-V3, arXiv
2412.19437, section 3.2.1). A pass is a run of rows: its segments, collectives and final row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    MESSAGES,
    is_any_of,
    is_compute,
    kinds_reading,
)
from weft.program.lower import LoweredPipeline, renumber
from weft.program.program import Columns
from weft.program.segments import SEGMENTS, StageSegments

_MESSAGES = tuple(kind for pair in MESSAGES for kind in pair)


def interleave(pipeline: LoweredPipeline, segments: Sequence[StageSegments]) -> LoweredPipeline:
    """Return the pipeline with consecutive passes in segments interleaved, two at a time.

    Passes that wait for each other stay in sequence. So do passes that exchange messages, because other ranks
    would wait longer for these. Collectives between two passes come behind both if only the first one
    precedes them. Sums of gradients keep their place.
    """
    columns = pipeline.columns
    passes = _passes(columns, segments)
    number_of = _numbers(len(columns), passes)
    touching, depends = _messages(pipeline, number_of, len(passes)), _depends(pipeline, number_of)
    between = _Between.of(pipeline, number_of, len(passes))
    order = np.arange(len(columns), dtype=np.int64)
    number = 0
    while number + 1 < len(passes):
        one, two = passes[number], passes[number + 1]
        apart = columns.rank[one.start] != columns.rank[two.start]
        behind = range(one.stop, two.start)
        stays = touching[number] or touching[number + 1] or number in depends
        if apart or stays or not between.may_wait(behind, number):
            number += 1
            continue
        order[one.start : two.stop] = [*_in_turns(_turns(columns, one), _turns(columns, two)), *behind]
        number += 2
    return LoweredPipeline(columns.take(order), renumber(pipeline.edges, order))


@dataclass(frozen=True, slots=True)
class _Between:
    """The place of each row among passes: the ones that it waits for, and those that wait for it, (rows,).

    Attributes:
        stays: True for rows that keep their place.
        after: the last pass that a row waits for, -1 for none. before: the first pass that waits for it.
    """

    stays: Mask
    after: Ints
    before: Ints

    @classmethod
    def of(cls, pipeline: LoweredPipeline, number: Ints, count: int) -> _Between:
        columns, edges = pipeline.columns, pipeline.edges
        source, target = edges.source[edges.distance == 0], edges.target[edges.distance == 0]
        after, before = (
            np.full(len(columns), -1, dtype=np.int64),
            np.full(len(columns), count, dtype=np.int64),
        )
        np.maximum.at(after, target, number[source])
        awaiting = number[target] >= 0
        np.minimum.at(before, source[awaiting], number[target[awaiting]])
        kept = (*_MESSAGES, *kinds_reading("weight_gradient"))
        return cls(is_compute(columns.kind) | is_any_of(columns.kind, kept), after, before)

    def may_wait(self, rows: range, number: int) -> bool:
        """Return True if these rows, behind the pass of this number, may come behind the next pass, too."""
        own = slice(rows.start, rows.stop)
        follow = (self.after[own] == number) & (self.before[own] > number + 1) & ~self.stays[own]
        return bool(follow.all())


def _passes(columns: Columns, segments: Sequence[StageSegments]) -> list[range]:
    """Return the rows of each pass in segments, in order."""
    ends = is_any_of(columns.kind, (FORWARD, BACKWARD, BACKWARD_INPUT))
    found = []
    for row in np.flatnonzero(ends).tolist():
        one = segments[columns.stage[row]]
        borders = one.forward if columns.kind[row] == FORWARD else one.backward
        apart = one.split if columns.kind[row] == BACKWARD else ()
        if borders:
            found.append(range(row - 2 * len(borders) - sum(apart), row + 1))
    return found


def _numbers(rows: int, passes: Sequence[range]) -> Ints:
    """Return the number of each row's pass, -1 for none."""
    number = np.full(rows, -1, dtype=np.int64)
    for index, one in enumerate(passes):
        number[one.start : one.stop] = index
    return number


def _messages(pipeline: LoweredPipeline, number: Ints, count: int) -> list[bool]:
    """Return True for each pass that waits for a message, or that a message waits for."""
    columns, edges = pipeline.columns, pipeline.edges
    message = is_any_of(columns.kind, _MESSAGES)
    found = np.zeros(count + 1, dtype=np.bool_)
    found[number[edges.target[message[edges.source]]]] = True
    found[number[edges.source[message[edges.target]]]] = True
    touching: list[bool] = found[:count].tolist()
    return touching


def _depends(pipeline: LoweredPipeline, number: Ints) -> set[int]:
    """Return the passes that the next pass depends on in the same step."""
    edges = pipeline.edges
    source, target = number[edges.source], number[edges.target]
    follows = (edges.distance == 0) & (source >= 0) & (target == source + 1)
    return set(source[follows].tolist())


def _turns(columns: Columns, rows: range) -> list[list[int]]:
    """Return turns: a computation each, with its collective and the weight part that overlaps with this."""
    turns: list[list[int]] = []
    opens = is_compute(columns.kind[rows.start : rows.stop])
    opens &= ~is_any_of(columns.kind[rows.start : rows.stop], (SEGMENTS[-1],))
    for row, begins in zip(rows, opens.tolist(), strict=True):
        if begins:
            turns.append([])
        turns[-1].append(row)
    return turns


def _in_turns(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]]) -> list[int]:
    merged: list[int] = []
    for turn in range(max(len(one), len(two))):
        for rows in (one, two):
            if turn < len(rows):
                merged += rows[turn]
    return merged
