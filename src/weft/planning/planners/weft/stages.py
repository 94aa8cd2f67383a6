"""Stages and shares for unlike devices: layers and a way to run by stage, micro-batches by replica."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.planning.planners.bounds import LayerBytes
from weft.planning.planners.metis_form import shared_by_speed
from weft.program.arrays import Floats, Ints

# Bisections of the interval of the longest stage's seconds.
_HALVINGS = 26


class Way(NamedTuple):
    """A way to run a stage. `times_s` has by pace each layer's seconds of one micro-batch, forward and
    backward. `memory` has the bytes of the layers."""

    times_s: Sequence[Floats]
    memory: LayerBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """The stages and shares of a layout on unlike devices, and the seconds of its slowest pipeline.

    `ways` has the index of each stage's way among its choices.
    """

    layers_per_stage: tuple[int, ...]
    ways: tuple[int, ...]
    micro_batches: tuple[int, ...]
    pipeline_s: float


def deal(
    ways: Sequence[Way],
    pace: Ints,
    place: Ints,
    room_bytes: Floats,
    in_flight: Floats,
    micro_batches: int,
    *,
    uneven: bool,
) -> Dealt | None:
    """Return the fitting stages with the shortest longest stage, and shares of the batch; None if nothing
    fits.

    Each stage takes the most layers that a limit and its memory admit in any way. This leaves the least to
    others. Bisection finds the least feasible limit. The result is exact for layers that are alike. Otherwise
    a slower stage's first layer may be too long for it, and the found limit is longer. Each stage then runs
    in the fastest way that fits.

    Args:
        ways: choices of every stage.
        pace: index into a way's `times_s` of each device of each replica, shape (devices, replicas).
        place: device of the pipeline that has each stage, shape (stages,); all devices have equally many
            stages, with equal parts of their memory.
        room_bytes: memory of the smallest device at each place of the pipeline, shape (devices,).
        in_flight: most micro-batches that each stage keeps, shape (stages,).
        micro_batches: number over all replicas.
        uneven: True if replicas share the batch by speed; otherwise they share it equally.
    """
    loops = len(place) // len(pace)
    memories = [way.memory.of_each(loops) for way in ways]
    fewest, room = in_flight.min(), room_bytes.sum()
    if all((one.states + one.buffers + fewest * one.left).sum() > room for one in memories):
        return None
    largest = [_largest(memory.made) for memory in memories]
    known: dict[tuple[int, ...], list[list[float]]] = {}
    seconds = []
    for row in map(tuple, pace.tolist()):
        if row not in known:
            known[row] = [_sums(_together(way.times_s, row, uneven=uneven)) for way in ways]
        seconds.append(known[row])
    rooms = (room_bytes / loops).tolist()
    lines = [
        [
            _Line(
                seconds=sums,
                held=_sums(memory.states + memory.buffers + count * memory.left),
                made=made,
                room=rooms[device],
            )
            for sums, memory, made in zip(seconds[device], memories, largest, strict=True)
        ]
        for device, count in zip(place.tolist(), in_flight.tolist(), strict=True)
    ]
    high = max(line.seconds[-1] for stage in lines for line in stage)
    counts = _greedy(lines, high)
    if counts is None:
        return None
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        found = _greedy(lines, middle)
        low, high, counts = (middle, high, counts) if found is None else (low, middle, found)
    return dealt(ways, pace, place, tuple(counts), _fastest(lines, counts), micro_batches, uneven=uneven)


def dealt(
    ways: Sequence[Way],
    pace: Ints,
    place: Ints,
    counts: tuple[int, ...],
    chosen: tuple[int, ...],
    micro_batches: int,
    *,
    uneven: bool,
) -> Dealt:
    """Return the shares and seconds of given stages in the `chosen` ways; see `deal`.

    A device runs a micro-batch through all its stages. At first it waits for one loop of the other devices.
    """
    stages = np.arange(len(counts))
    by_pace = np.array([[_stage_sums(times, counts) for times in way.times_s] for way in ways])
    # Seconds of each stage's own layers in its own way at its own pace, shape (stages, replicas).
    stage_s = by_pace[np.array(chosen)[:, None], pace[place], stages[:, None]]
    device_s = np.zeros(pace.shape)
    np.add.at(device_s, place, stage_s)
    longest_s = device_s.max(axis=0)
    shares = (micro_batches // pace.shape[1],) * pace.shape[1]
    if uneven:
        shares = shared_by_speed(1.0 / longest_s, micro_batches)
    waited_s = (device_s.sum(axis=0) - longest_s) * len(pace) / len(place)
    filled_s = np.array(shares) * longest_s + waited_s
    return Dealt(layers_per_stage=counts, ways=chosen, micro_batches=shares, pipeline_s=float(filled_s.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """All layers on a stage's devices in one way: `seconds` and `held` (bytes) are sums before each layer.
    `made[i][j]` is the most recomputed bytes of layers i to i + j; None: nothing. `room` is in bytes."""

    seconds: list[float]
    held: list[float]
    made: list[list[float]] | None
    room: float

    def needed(self, start: int, end: int) -> float:
        """Return the bytes of a stage with layers `start` to `end - 1`."""
        made = 0.0 if self.made is None else self.made[start][end - start - 1]
        return self.held[end] - self.held[start] + made

    def furthest(self, start: int, last: int, limit_s: float) -> int:
        """Return the end of the most layers from `start` on that are within the limit and fit."""
        end = bisect_right(self.seconds, self.seconds[start] + limit_s, start, last + 1) - 1
        end = min(end, bisect_right(self.held, self.held[start] + self.room, start, last + 1) - 1)
        if self.made is None or end <= start:
            return end
        ends = range(start + 1, end + 1)
        return start + bisect_right(ends, self.room, key=lambda one: self.needed(start, one))


def _largest(values: Floats) -> list[list[float]] | None:
    """Return the running maxima from each layer on, one row per layer; None if all values are 0."""
    if not values.any():
        return None
    return [np.maximum.accumulate(values[start:]).tolist() for start in range(len(values))]


def _together(times_s: Sequence[Floats], row: tuple[int, ...], *, uneven: bool) -> Floats:
    """Return each layer's seconds for one micro-batch on every replica of a stage."""
    kinds = sorted(set(row))
    rows = np.array([times_s[kind] for kind in kinds])
    if not uneven or len(rows) == 1:
        slowest: Floats = rows.max(axis=0)
        return slowest
    # Together replicas are as fast as the sum of their speeds.
    tiny = np.finfo(float).tiny
    counts = np.array([row.count(kind) for kind in kinds])
    mean: Floats = len(row) / (counts[:, None] / np.maximum(rows, tiny)).sum(axis=0)
    return mean


def _sums(values: Floats) -> list[float]:
    return [0.0, *np.cumsum(values).tolist()]


def _stage_sums(values: Floats, counts: tuple[int, ...]) -> Floats:
    ends = np.cumsum(counts)
    sums: Floats = np.add.reduceat(values, ends - np.array(counts))
    return sums


def _greedy(lines: Sequence[Sequence[_Line]], limit_s: float) -> list[int] | None:
    """Return the most layers per stage within limit and memory, at least one each; None if that fails."""
    layers, stages, start = len(lines[0][0].seconds) - 1, len(lines), 0
    counts = []
    for stage, choice in enumerate(lines):
        last = layers - (stages - stage - 1)
        end = max(line.furthest(start, last, limit_s) for line in choice)
        if end <= start:
            return None
        counts.append(end - start)
        start = end
    return counts if start == layers else None


def _fastest(lines: Sequence[Sequence[_Line]], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the fastest way that fits, for each stage."""
    chosen, start = [], 0
    for choice, count in zip(lines, counts, strict=True):
        end = start + count
        seconds = [
            line.seconds[end] - line.seconds[start] if line.needed(start, end) <= line.room else float("inf")
            for line in choice
        ]
        chosen.append(seconds.index(min(seconds)))
        start = end
    return tuple(chosen)
