"""A plan's stages in words: what each holds, where, and how full that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.describe.cluster import Cluster
from weft.describe.plan import Plan, Stage
from weft.describe.prediction import Prediction
from weft.describe.units import format_bytes

HEAD = ("stage", "layers", "ranks", "recompute", "peak memory", "of the device's")


def stage_rows(plan: Plan, prediction: Prediction, cluster: Cluster) -> list[tuple[str, ...]]:
    """A row of `HEAD` for each stage; memory is that of its fullest rank, with all that lies on it."""
    return [_row(index, stage, prediction.peak_bytes, cluster) for index, stage in enumerate(plan.stages)]


def _row(index: int, stage: Stage, peaks: Sequence[int], cluster: Cluster) -> tuple[str, ...]:
    ranks = sorted(rank for replica in stage.replicas for rank in replica.ranks)
    cells = (str(index), spans(stage.layers), spans(ranks), stage.recompute)
    fullest = max(ranks, key=lambda rank: peaks[rank] / cluster.device_of(rank).memory_bytes)
    share = peaks[fullest] / cluster.device_of(fullest).memory_bytes
    return (*cells, format_bytes(peaks[fullest]), f"{share:.0%}")


def spans(numbers: Iterable[int]) -> str:
    """Numbers that rise, neighbours joined: 0-3, 6."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
