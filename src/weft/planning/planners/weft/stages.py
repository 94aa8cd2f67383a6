"""Stages and shares for unlike devices: layers of each stage, micro-batches of each replica."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.planning.planners.bounds import LayerBytes
from weft.planning.planners.metis_form import shared_by_speed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Halvings of the interval in which the longest stage is looked for.
_HALVINGS = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """What a layout on unlike devices is given, and the seconds of its slowest pipeline."""

    layers_per_stage: tuple[int, ...]
    micro_batches: tuple[int, ...]
    pipeline_s: float


def deal(
    times_s: Sequence[Floats],
    pace: Ints,
    room_bytes: Floats,
    memory: LayerBytes,
    micro_batches: int,
    *,
    uneven: bool,
) -> Dealt | None:
    """The stages with the shortest longest stage that fit, and shares of the batch; None where nothing fits.

    A stage that takes as many layers as a limit and its memory admit leaves the least to the others, so the
    least feasible limit is found by halving. That is exact for layers that are alike. Where they are not, the
    first layer that is left to a slower stage may be too long for it, and a longer limit is found.

    Args:
        times_s: by pace, seconds of one micro-batch, forward and backward, in each layer.
        pace: index into `times_s` of each stage of each replica, shape (stages, replicas).
        room_bytes: memory of the smallest device of each stage, shape (stages,).
        memory: of the layers.
        micro_batches: of all replicas together.
        uneven: whether replicas share the batch out by their speed; else equally.
    """
    stages, replicas = pace.shape
    together = [_together(times_s, row, uneven=uneven) for row in pace]
    sums = [_sums(times) for times in together]
    in_flight = np.minimum(stages - np.arange(stages), max(1, micro_batches // replicas))
    held = [_sums(memory.states + memory.gradients + count * memory.left) for count in in_flight.tolist()]
    rooms = room_bytes.tolist()
    high = max(line[-1] for line in sums)
    counts = _greedy(sums, held, rooms, high)
    if counts is None:
        return None
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        found = _greedy(sums, held, rooms, middle)
        low, high, counts = (middle, high, counts) if found is None else (low, middle, found)
    return dealt(times_s, pace, tuple(counts), micro_batches, uneven=uneven)


def dealt(
    times_s: Sequence[Floats], pace: Ints, counts: tuple[int, ...], micro_batches: int, *, uneven: bool
) -> Dealt:
    """Shares and seconds of given stages; see `deal`."""
    replicas = pace.shape[1]
    by_pace = np.array([_stage_sums(times, counts) for times in times_s])
    # Of every stage its own layers at its own pace: (stages, replicas).
    stage_s = by_pace[pace, np.arange(len(counts))[:, None]]
    longest_s = stage_s.max(axis=0)
    shares = (micro_batches // replicas,) * replicas
    if uneven:
        shares = shared_by_speed(1.0 / longest_s, micro_batches)
    filled_s = (np.array(shares) - 1) * longest_s + stage_s.sum(axis=0)
    return Dealt(layers_per_stage=counts, micro_batches=shares, pipeline_s=float(filled_s.max()))


def _together(times_s: Sequence[Floats], row: Ints, *, uneven: bool) -> Floats:
    """Seconds in which the replicas of a stage get a micro-batch each through every layer."""
    kinds, counts = np.unique(row, return_counts=True)
    rows = np.array([times_s[kind] for kind in kinds.tolist()])
    if not uneven or len(rows) == 1:
        slowest: Floats = rows.max(axis=0)
        return slowest
    # Together replicas are as fast as the sum of their speeds.
    tiny = np.finfo(float).tiny
    mean: Floats = counts.sum() / (counts[:, None] / np.maximum(rows, tiny)).sum(axis=0)
    return mean


def _sums(values: Floats) -> list[float]:
    return [0.0, *np.cumsum(values).tolist()]


def _stage_sums(values: Floats, counts: tuple[int, ...]) -> Floats:
    ends = np.cumsum(counts)
    sums: Floats = np.add.reduceat(values, ends - np.array(counts))
    return sums


def _greedy(
    sums: Sequence[Sequence[float]], held: Sequence[Sequence[float]], rooms: Sequence[float], limit_s: float
) -> list[int] | None:
    """As many layers for each stage as the limit and its memory admit, and one at least for all others."""
    layers, stages, start = len(sums[0]) - 1, len(sums), 0
    counts = []
    for stage in range(stages):
        last = layers - (stages - stage - 1)
        line, room = sums[stage], held[stage]
        end = bisect_right(line, line[start] + limit_s, start, last + 1) - 1
        end = min(end, bisect_right(room, room[start] + rooms[stage], start, last + 1) - 1)
        if end <= start:
            return None
        counts.append(end - start)
        start = end
    return counts if start == layers else None
