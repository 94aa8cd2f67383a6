"""Ranks that do the same at the same times, such as the replicas of a pipeline."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from weft.program.arrays import Ints
from weft.timeline.timeline import Timeline


def folded_ranks(timeline: Timeline) -> list[tuple[int, ...]]:
    """Return the ranks in groups, in order of their first ranks.

    Ranks of a group have equal instructions at equal times. Their micro-batches may differ.
    """
    alike: dict[bytes, list[int]] = defaultdict(list)
    instructions = _instructions(timeline)
    for rank, rows in _rows_by_rank(timeline).items():
        alike[instructions[rows].tobytes()].append(rank)
    return [tuple(group) for group in alike.values()]


def leading_rows(timeline: Timeline) -> Ints:
    """Return for each row the equal row of the first rank of its group; shape (rows,)."""
    rows = _rows_by_rank(timeline)
    leading = np.arange(len(timeline))
    for first, *others in folded_ranks(timeline):
        for rank in others:
            leading[rows[rank]] = rows[first]
    return leading


def _instructions(timeline: Timeline) -> Ints:
    return np.stack((timeline.start_ns, timeline.end_ns, timeline.kind, timeline.stage), axis=1)


def _rows_by_rank(timeline: Timeline) -> dict[int, Ints]:
    """Return the rows of each rank, in an order that depends on instructions and times alone."""
    order = np.lexsort((*_instructions(timeline).T[::-1], timeline.rank))
    ranks, first = np.unique(timeline.rank[order], return_index=True)
    return dict(zip(ranks.tolist(), np.split(order, first[1:]), strict=False))
