"""Partition of a chain of layers into contiguous stages of nearly equal weight."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import InputError, Violation


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
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)

    # best[end] = (bottleneck, sum of squares) of the first `end` layers in the current number of groups.
    infinite = (float("inf"), float("inf"))
    best = [(0.0, 0.0)] + [infinite] * layers
    cuts: list[list[int]] = []
    for group in range(1, stages + 1):
        following = [infinite] * (layers + 1)
        cut = [0] * (layers + 1)
        for end in range(group, layers - (stages - group) + 1):
            for start in range(end - 1, group - 2, -1):
                weight = total[end] - total[start]
                if weight > following[end][0]:
                    break
                candidate = (max(best[start][0], weight), best[start][1] + weight * weight)
                if candidate < following[end]:
                    following[end], cut[end] = candidate, start
        best = following
        cuts.append(cut)

    groups: list[list[int]] = []
    end = layers
    for cut in reversed(cuts):
        groups.append(list(range(cut[end], end)))
        end = cut[end]
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
