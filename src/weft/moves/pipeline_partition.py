"""Exact partition of a chain of layers into pipeline stages, with the cost of communication at the cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Floats

# Sums of the same layers that differ only in their rounding are equal.
ROUNDING = 1e-12
# Number of limits of the longest stage that are tried at once.
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class PipelinePartition:
    """Layers of each stage, and the seconds of the resulting pipeline."""

    layers_per_stage: tuple[int, ...]
    seconds: float


def pipeline_partition(work_s: Floats, cut_s: Floats, micro_batches: int) -> PipelinePartition:
    """Return contiguous stages, none empty, with the least

        sum of stages + sum of cuts + (micro_batches - 1) x longest stage

    (Li et al., AMP, arXiv 2210.07297). The result is exact. For every limit of the longest stage, shortest
    first, a dynamic program finds the best stages within it. It stops when longer limits cannot improve.
    Ties go to the partition with the shortest longest stage, then to the earliest cuts.

    Args:
        work_s: seconds of one micro-batch in each layer on each stage's devices, shape (stages, layers).
        cut_s: seconds of the cut after each layer between each stage and the next, shape
            (stages - 1, layers).
        micro_batches: of one step.

    Raises:
        InputError: when there are fewer layers than stages.
    """
    stages, layers = work_s.shape
    if not 1 <= stages <= layers:
        raise InputError(Violation("stages", f"{stages} stages; between 1 and {layers} layers' worth fit"))
    lengths = _lengths(work_s)
    costs = lengths.copy()
    costs[:-1, :, 1:] += cut_s[:, None, :]
    limits = _limits(_lengths(np.unique(work_s, axis=0)))
    first = _first_possible(lengths, costs, limits)
    least = float(_least_costs(lengths, costs, limits[-1:])[0, 0, 0])
    best, chosen = np.inf, float(limits[first])
    count = 1
    while first < len(limits) and least + (micro_batches - 1) * limits[first] < best * (1.0 - ROUNDING):
        tried = limits[first : first + count]
        totals = _least_costs(lengths, costs, tried)[0, :, 0] + (micro_batches - 1) * tried
        shortest = int(np.argmax(totals <= totals.min() * (1.0 + ROUNDING)))
        if totals[shortest] < best * (1.0 - ROUNDING):
            best, chosen = float(totals[shortest]), float(tried[shortest])
        first, count = first + count, _AT_ONCE
    return PipelinePartition(_cut(lengths, costs, chosen), best)


def _lengths(work_s: Floats) -> Floats:
    """Return seconds of a stage with layers i to j - 1, shape (stages, layers + 1, layers + 1).
    They are infinite where j <= i."""
    stages, layers = work_s.shape
    sums = np.concatenate([np.zeros((stages, 1)), np.cumsum(work_s, axis=1)], axis=1)
    empty = np.tril(np.ones((layers + 1, layers + 1), dtype=np.bool_))
    return np.where(empty, np.inf, sums[:, None, :] - sums[:, :, None])


def _limits(lengths: Floats) -> Floats:
    """Return the possible lengths of a stage in rising order."""
    found = np.unique(lengths[np.isfinite(lengths)])
    # Keep the longest of lengths that differ only by rounding.
    apart = np.append(np.diff(found) > ROUNDING * found[-1], True)
    kept: Floats = found[apart]
    return kept


def _first_possible(lengths: Floats, costs: Floats, limits: Floats) -> int:
    """Return the position of the shortest limit that all stages can keep."""
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if np.isfinite(_least_costs(lengths, costs, limits[middle : middle + 1])[0, 0, 0]):
            high = middle
        else:
            low = middle + 1
    return low


def _least_costs(lengths: Floats, costs: Floats, limits: Floats) -> Floats:
    """Return the least costs of layers from i on in all later stages, (stages + 1, limits, layers + 1)."""
    stages, borders = len(lengths), lengths.shape[1]
    least = np.full((stages + 1, len(limits), borders), np.inf)
    least[stages, :, -1] = 0.0
    for stage in range(stages - 1, -1, -1):
        short = lengths[stage] <= limits[:, None, None] * (1.0 + ROUNDING)
        reached = np.where(short, costs[stage] + least[stage + 1][:, None, :], np.inf)
        least[stage] = reached.min(axis=2)
    return least


def _cut(lengths: Floats, costs: Floats, limit: float) -> tuple[int, ...]:
    """Return layers per stage of the best cuts with no stage longer than the limit, early cuts first."""
    least = _least_costs(lengths, costs, np.array([limit]))[:, 0]
    counts, start = [], 0
    for stage in range(len(lengths)):
        short = lengths[stage, start] <= limit * (1.0 + ROUNDING)
        reached = np.where(short, costs[stage, start] + least[stage + 1], np.inf)
        end = int(np.argmax(reached <= reached.min() * (1.0 + ROUNDING)))
        counts.append(end - start)
        start = end
    return tuple(counts)
