"""Figures of a timeline: busy time of ranks, by kind, and errors of predictions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeVar

import numpy as np

from weft.program.arrays import Floats
from weft.program.kinds import BACKWARD, BACKWARD_WEIGHT, FORWARD, KINDS, is_compute
from weft.program.program import Program
from weft.timeline.timeline import Timeline


def makespan_s(timeline: Timeline) -> float:
    """Return seconds from the first start to the last end."""
    if not len(timeline):
        return 0.0
    return float(timeline.end_ns.max() - timeline.start_ns.min()) / 1e9


def busy_s(timeline: Timeline) -> Floats:
    """Return the seconds of computation on each rank, one value per existing rank, ascending."""
    compute = is_compute(timeline.kind)
    ranks, rank = np.unique(timeline.rank, return_inverse=True)
    duration = (timeline.end_ns - timeline.start_ns)[compute]
    return np.bincount(rank[compute], weights=duration, minlength=len(ranks)) / 1e9


def busy_fraction(timeline: Timeline) -> Floats:
    """Return each rank's computation as a share of the makespan, one value per existing rank, ascending."""
    makespan = makespan_s(timeline)
    return busy_s(timeline) / makespan if makespan else np.zeros_like(busy_s(timeline))


def bubble_fraction(timeline: Timeline) -> float:
    """Return 1 - busy / (ranks * makespan)."""
    fraction = busy_fraction(timeline)
    return 1.0 - float(fraction.mean()) if len(fraction) else 0.0


def bubble_overhead(timeline: Timeline) -> float:
    """Return makespan / ideal - 1; the ideal is the busiest rank's computation without any wait."""
    ideal = float(busy_s(timeline).max(initial=0.0))
    return makespan_s(timeline) / ideal - 1.0 if ideal else 0.0


def busy_by_kind(timeline: Timeline) -> dict[str, float]:
    """Return seconds by kind of instruction, all ranks together, in order of registration."""
    duration = np.bincount(timeline.kind, weights=timeline.end_ns - timeline.start_ns, minlength=len(KINDS))
    occurs = np.bincount(timeline.kind, minlength=len(KINDS)) > 0
    return {kind.name: float(duration[code]) / 1e9 for code, kind in enumerate(KINDS) if occurs[code]}


def peak_in_flight(program: Program) -> list[int]:
    """Return the most stage-micro-batches each rank holds at once, from the order of its program alone.

    A rank holds one from its forward to its backward, or to the weight part of a split backward. A stage
    without training holds none. A program without backwards counts as if it kept everything.
    """
    change = np.zeros(len(KINDS), dtype=np.int64)
    change[FORWARD] = 1
    change[[BACKWARD, BACKWARD_WEIGHT]] = -1
    held = change[program.columns.kind]
    trained = program.obligations.backward[:, 0]
    if len(trained):
        held = np.where(np.isin(program.columns.stage, trained), held, 0)
    starts = program.rank_starts
    return [int(np.cumsum(held[start:end]).max(initial=0)) for start, end in pairwise(starts)]


_Values = TypeVar("_Values", float, Floats)


def prediction_error(predicted: _Values, measured: _Values) -> _Values:
    """Return the relative error, predicted / measured - 1; negative if the prediction was too short."""
    return predicted / measured - 1.0


def error_text(error: float) -> str:
    """Return the error as a signed percentage; "-" without a measured value."""
    return f"{error:+.1%}" if math.isfinite(error) else "-"
