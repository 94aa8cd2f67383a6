"""Stages and shares for unlike devices: layers and a way to run for stages, micro-batches for replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from weft.planning.planners.bounds import LayerBytes
from weft.planning.planners.metis_form import shared_by_speed
from weft.program.arrays import Floats, Ints

# Halvings of the interval that contains the longest stage.
_HALVINGS = 26
# More than the rounding of sums of seconds, relative.
_ROUNDING = 1e-12


class Way(NamedTuple):
    """A way to run a stage.

    `times_s` are by pace the seconds of one micro-batch, forward and backward, in each layer. `memories` are
    by pace the bytes of the layers.
    """

    times_s: Sequence[Floats]
    memories: Sequence[LayerBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Stages and shares of a layout on unlike devices, and the seconds of its slowest pipeline.

    `ways` is the index of each stage's way among its choices.
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
    """Return the fitting stages with the shortest longest stage, and shares of the batch; None where none
    fit.

    A stage takes as many layers as a limit and its memory admit, in any way. This leaves the least to the
    others, so halving finds the least feasible limit. That is exact for equal layers. Otherwise the first
    layer left to a slower stage may be too long for it, and the limit rises. Each stage then runs in the
    fastest way that fits.

    Args:
        ways: the choices of every stage.
        pace: index into a way's sequences of each device of each replica, shape (devices, replicas). A place
            has the bytes of its first replica.
        place: the device of the pipeline that has each stage, shape (stages,); each has equally many stages,
            which share its memory equally.
        room_bytes: memory of the smallest device at each place of the pipeline, shape (devices,).
        in_flight: the most micro-batches that each stage keeps, shape (stages,).
        micro_batches: the micro-batches of all replicas together.
        uneven: True if replicas share the batch by their speed, else equally.
    """
    loops = len(place) // len(pace)
    used = np.unique(pace[:, 0]).tolist()
    memories = [{kind: way.memories[kind].of_each(loops) for kind in used} for way in ways]
    fewest, room = in_flight.min(), room_bytes.sum()
    every = [one for by_pace in memories for one in by_pace.values()]
    if all((one.states + one.buffers + fewest * one.left).sum() > room for one in every):
        return None
    largest = [{kind: _largest(one) for kind, one in by_pace.items()} for by_pace in memories]
    known: dict[tuple[int, ...], list[list[float]]] = {}
    seconds = []
    for row in map(tuple, pace.tolist()):
        if row not in known:
            known[row] = [_sums(_together(way.times_s, row, uneven=uneven)) for way in ways]
        seconds.append(known[row])
    rooms = (room_bytes / loops).tolist()
    kinds = pace[:, 0].tolist()

    def line(way: int, device: int, count: float) -> _Line:
        memory, taken = memories[way][kinds[device]], largest[way][kinds[device]]
        return _Line(
            seconds=seconds[device][way],
            held=_sums(memory.states + memory.buffers + count * memory.left),
            taken=taken,
            room=rooms[device],
        )

    lines = [
        [line(way, device, count) for way in range(len(ways))]
        for device, count in zip(place.tolist(), in_flight.tolist(), strict=True)
    ]
    counts = _shortest(lines)
    if counts is None:
        return None
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
    """Return shares and seconds of given stages that run in the `chosen` ways; see `deal`.

    A device runs a micro-batch through all its stages. At first it waits for one loop of the other devices.
    """
    stages = np.arange(len(counts))
    by_pace = np.array([[_stage_sums(times, counts) for times in way.times_s] for way in ways])
    # The layers of each stage in its own way at its own pace: (stages, replicas).
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
    """All layers on a stage's devices in one way. `seconds` and `held` are sums before each layer.
    `taken[start]` is by length the most bytes that a backward pass of the layers from `start` on takes.
    `room` is the memory of the stage."""

    seconds: list[float]
    held: list[float]
    taken: list[list[float]]
    room: float

    def needed(self, start: int, end: int) -> float:
        """Return the bytes of a stage with these layers."""
        return self.held[end] - self.held[start] + self.taken[start][end - start - 1]

    def furthest(self, start: int, last: int, limit_s: float) -> int:
        """Return the end of the longest run of layers from `start` that is within the limit and fits."""
        end = bisect_right(self.seconds, self.seconds[start] + limit_s, start, last + 1) - 1
        end = min(end, bisect_right(self.held, self.held[start] + self.room, start, last + 1) - 1)
        if end <= start or self.needed(start, end) <= self.room:
            return end
        ends = range(start + 1, end + 1)
        return start + bisect_right(ends, self.room, key=lambda one: self.needed(start, one))


def _largest(memory: LayerBytes) -> list[list[float]]:
    """Return the bytes that backward passes of runs of layers take: from each layer on, by length."""
    left = np.cumsum(memory.left)
    most = memory.taken + left
    return [
        np.maximum(0.0, np.maximum.accumulate(most[start:]) - left[start:]).tolist()
        for start in range(len(left))
    ]


def _together(times_s: Sequence[Floats], row: tuple[int, ...], *, uneven: bool) -> Floats:
    """Return the seconds per layer in which a stage's replicas finish one micro-batch each."""
    kinds = sorted(set(row))
    rows = np.array([times_s[kind] for kind in kinds])
    if not uneven or len(rows) == 1:
        slowest: Floats = rows.max(axis=0)
        return slowest
    # The replicas together are as fast as the sum of their speeds.
    tiny = np.finfo(float).tiny
    counts = np.array([row.count(kind) for kind in kinds])
    mean: Floats = len(row) / (counts[:, None] / np.maximum(rows, tiny)).sum(axis=0)
    return mean


def _sums(values: Floats) -> list[float]:
    return [0.0, *np.cumsum(values).tolist()]


def _stage_sums(values: Floats, counts: tuple[int, ...]) -> Floats:
    ends = np.cumsum(counts)
    return np.add.reduceat(values, ends - np.array(counts))


def _shortest(lines: Sequence[Sequence[_Line]]) -> list[int] | None:
    """Return the layers of stages whose longest is as short as `_greedy` finds; None where none fit.

    Limits that are known to give the same stages, or none, are not tried.
    """
    stages, low, high = len(lines), 0.0, max(line.seconds[-1] for stage in lines for line in stage)
    counts = _greedy(lines, high)
    if len(counts) < stages:
        return None
    enough, too_short = _longest(lines, counts), 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if too_short < middle < enough:
            found = _greedy(lines, middle)
            if len(found) < stages:
                too_short = _next_limit(lines, found, middle)
            else:
                counts, enough = found, min(middle, _longest(lines, found))
        if too_short >= enough:
            break
        low, high = (low, middle) if middle >= enough else (middle, high)
    return counts


def _greedy(lines: Sequence[Sequence[_Line]], limit_s: float) -> list[int]:
    """Give each stage as many layers as the limit and its memory admit; leave one for each later stage.

    The stages end before one that gets no layer, and before the last one if it cannot take the rest.
    """
    layers, stages, start = len(lines[0][0].seconds) - 1, len(lines), 0
    counts: list[int] = []
    for stage, choice in enumerate(lines):
        last = layers - (stages - stage - 1)
        end = max(line.furthest(start, last, limit_s) for line in choice)
        if end <= start or (end < last == layers):
            break
        counts.append(end - start)
        start = end
    return counts


def _longest(lines: Sequence[Sequence[_Line]], counts: Sequence[int]) -> float:
    """Return the least limit with which `_greedy` gives these stages, rounded up."""
    ends = [0, *accumulate(counts)]
    longest_s = max(
        min(
            line.seconds[end] - line.seconds[start] for line in choice if line.needed(start, end) <= line.room
        )
        for choice, (start, end) in zip(lines, pairwise(ends), strict=True)
    )
    return longest_s * (1.0 + _ROUNDING)


def _next_limit(lines: Sequence[Sequence[_Line]], counts: Sequence[int], limit_s: float) -> float:
    """Return the least limit above this one with which `_greedy` may not end after these stages, rounded
    down."""
    layers, stages = len(lines[0][0].seconds) - 1, len(lines)
    least_s = float("inf")
    for stage, (choice, start) in enumerate(zip(lines, accumulate(counts, initial=0), strict=False)):
        last = layers - (stages - stage - 1)
        for line in choice:
            end = bisect_right(line.seconds, line.seconds[start] + limit_s, start, last + 1)
            if end <= last:
                least_s = min(least_s, line.seconds[end] - line.seconds[start])
    return least_s * (1.0 - _ROUNDING)


def _fastest(lines: Sequence[Sequence[_Line]], counts: Sequence[int]) -> tuple[int, ...]:
    """Return for each stage the fastest way that fits."""
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
