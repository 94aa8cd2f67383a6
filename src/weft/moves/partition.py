"""Partition of a chain of layers into contiguous stages of nearly equal weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Ints


def balanced_partition(weights: Sequence[float], stages: int) -> list[list[int]]:
    """Return contiguous groups of positions, none empty, with the smallest possible heaviest group.

    Among partitions with the same bottleneck, the least sum of squares decides, group by group: ties go to
    even groups. Exact dynamic program in O(stages * layers^2).

    Raises:
        InputError: when there are fewer layers than stages.
    """
    layers = len(weights)
    if not 1 <= stages <= layers:
        raise InputError(Violation("stages", f"{stages} stages; between 1 and {layers} layers' worth fit"))
    total = np.array([0.0, *accumulate(weights)])
    # Of the layers from a start (row) to an end (column), which follows it.
    weight = np.where(np.tri(layers + 1, dtype=np.bool_), np.inf, total - total[:, None])
    # Of the first `end` layers in the current number of groups.
    heaviest, squares = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    heaviest[0] = squares[0] = 0.0
    cuts: list[Ints] = []
    for group in range(1, stages + 1):
        starts, ends = slice(group - 1, layers - stages + group), slice(group, layers - stages + group + 1)
        last = weight[starts, ends]
        heavier = np.maximum(heaviest[starts, None], last)
        heaviest[ends] = heavier.min(axis=0)
        sums = np.where(heavier == heaviest[ends], squares[starts, None] + last * last, np.inf)
        squares[ends] = sums.min(axis=0)
        # Of equal ones, the latest start.
        cuts.append(layers - stages + group - 1 - np.argmin(sums[::-1], axis=0))

    groups: list[list[int]] = []
    end = layers
    for group in range(stages, 0, -1):
        start = int(cuts[group - 1][end - group])
        groups.append(list(range(start, end)))
        end = start
    return groups[::-1]


def uniform_partition(
    layers: int, stages: int, leading: int = 0, trailing: int = 0, *, ends_last: bool = False
) -> tuple[int, ...] | None:
    """Distribute layers over stages by count; return None if a stage would have no layer.

    All layers but the first `leading` and the last `trailing` ones are distributed equally. The first stages
    take one extra layer each; with `ends_last`, the stages between the ends come first.
    Then the first stage adds the leading layers and the last stage the trailing layers.
    """
    each, more = divmod(layers - leading - trailing, stages)
    counts = [each] * stages
    order = range(stages)
    for stage in [*order[1:-1], *order[:1], *order[1:][-1:]][:more] if ends_last else order[:more]:
        counts[stage] += 1
    counts[0] += leading
    counts[-1] += trailing
    return tuple(counts) if min(counts) > 0 else None
