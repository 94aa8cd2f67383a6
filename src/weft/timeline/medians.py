"""Figures of one timeline per step: times of steps, instructions and waits, as medians over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from weft.program.arrays import Floats, Ids, Ints
from weft.program.kinds import is_compute
from weft.timeline.timeline import Timeline

_Key = TypeVar("_Key", bound=np.generic)


@dataclass(frozen=True)
class Instructions:
    """One row per instruction id, ascending; `duration_s` is the median over the steps."""

    id: Ids
    kind: Ints
    stage: Ints
    micro_batch: Ints
    rank: Ints
    duration_s: Floats

    def take(self, rows: npt.NDArray[np.intp]) -> Instructions:
        return Instructions(**{name: column[rows] for name, column in vars(self).items()})


def cycle_of(timeline: Timeline) -> int:
    """Return the number of steps after which instructions repeat; for a shorter timeline, its steps."""
    if not len(timeline):
        return 1
    _, first = np.unique(timeline.step, return_index=True)
    return len(np.unique(np.minimum.reduceat(timeline.id, first)))


def typical_step_s(steps: Sequence[int], seconds: Sequence[float], cycle: int) -> float:
    """Return the mean, over the places of a cycle, of the median step at each place.

    Args:
        steps, seconds: number and time of each step.
    """
    place, length = np.array(steps, dtype=np.int64) % cycle, np.array(seconds, dtype=np.float64)
    return float(np.mean([np.median(length[place == one]) for one in np.unique(place)]))


def from_step(timeline: Timeline, step: int) -> Timeline:
    """Return the rows of this and all later steps."""
    return timeline.take(timeline.step >= step)


def step_times_s(timeline: Timeline) -> Floats:
    """Return seconds per step, one value per step of the timeline, ascending.

    A step lasts from its first start to the first start of the next step. Without a next step it lasts as
    long as its busiest rank. In a steady cycle both are the same.
    """
    pairs, pair = np.unique(np.stack([timeline.step, timeline.rank], axis=1), axis=0, return_inverse=True)
    begin = np.full(len(pairs), np.iinfo(np.int64).max)
    end = np.full(len(pairs), np.iinfo(np.int64).min)
    np.minimum.at(begin, pair.reshape(-1), timeline.start_ns)
    np.maximum.at(end, pair.reshape(-1), timeline.end_ns)
    steps, first = np.unique(pairs[:, 0], return_index=True)
    if not len(steps):
        return np.zeros(0)
    length = np.maximum.reduceat(end - begin, first)
    first_start = np.minimum.reduceat(begin, first)
    length[:-1] = np.where(np.diff(steps) == 1, np.diff(first_start), length[:-1])
    return length / 1e9


def instructions(timeline: Timeline) -> Instructions:
    """Return the median duration of each instruction."""
    ids, first = np.unique(timeline.id, return_index=True)
    return Instructions(
        id=ids,
        kind=timeline.kind[first],
        stage=timeline.stage[first],
        micro_batch=timeline.micro_batch[first],
        rank=timeline.rank[first],
        duration_s=median_by(timeline.id, timeline.end_ns - timeline.start_ns)[1] / 1e9,
    )


def waits_s(timeline: Timeline) -> tuple[Ints, Floats]:
    """Return (ranks, median idle seconds of a rank's compute stream between its instructions of one step)."""
    rows = np.flatnonzero(is_compute(timeline.kind))
    rows = rows[np.lexsort((timeline.start_ns[rows], timeline.rank[rows], timeline.step[rows]))]
    step, rank = timeline.step[rows], timeline.rank[rows]
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    gap = np.zeros(len(rows), dtype=np.int64)
    same = (np.diff(step) == 0) & (np.diff(rank) == 0)
    gap[1:] = np.where(same, np.maximum(start[1:] - end[:-1], 0), 0)
    pairs, pair = np.unique(np.stack([step, rank], axis=1), axis=0, return_inverse=True)
    total = np.bincount(pair.reshape(-1), weights=gap, minlength=len(pairs))
    ranks, median = median_by(pairs[:, 1], total)
    return ranks, median / 1e9


def median_by(key: npt.NDArray[_Key], value: Ints | Floats) -> tuple[npt.NDArray[_Key], Floats]:
    """Return (distinct keys, ascending; median of the values of each)."""
    order = np.lexsort((value, key))
    keys, first, count = np.unique(key[order], return_index=True, return_counts=True)
    ordered = value[order]
    middle: Floats = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2.0
    return keys, middle
