"""Measurements of a machine (`MachineMeasurement`) and of a model's layers on it (`LayerProfile`).

Both are plain files in `WEFT_HOME`, written by `weft measure` and readable by any tool.
`value_at` interpolates and extrapolates their tables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

Table = Sequence[tuple[float, float]]
"""(size, value), rising in size."""


def value_at(points: Table, size: float) -> float:
    """Return the value at `size`, interpolated linearly between the two nearest points.

    Below the smallest measured size the value stays constant, because overhead dominates. Above the largest
    size it grows in proportion. `points` rise in size.
    """
    index = bisect_left(points, (size,))
    if index == 0:
        return points[0][1]
    if index == len(points):
        largest, value = points[-1]
        return value * size / largest if largest else value
    (left, left_value), (right, right_value) = points[index - 1], points[index]
    return left_value + (right_value - left_value) * (size - left) / (right - left)


def seconds_of_speeds(points: Table) -> tuple[tuple[float, float], ...]:
    """Return (size, seconds) pairs from (size, size per second) pairs."""
    return tuple((size, size / speed) for size, speed in points)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """Measured times of one layer kind at one micro-batch size; the columns of a profile file.

    `layer` is a kind of layer or a layer's name. Times with `tp` above 1 contain the tensor ranks' exchanges.
    """

    device: str
    layer: str
    tp: int
    micro_batch_size: int
    forward_s: float
    backward_s: float
    update_s: float
    activation_bytes: int


PROFILE_COLUMNS = tuple(column.name for column in fields(LayerTiming))


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Measured layers of one model at one sequence length and precision.

    `model_fingerprint` ties the profile to a LayerGraph. An empty one fits any model, a `sequence` of 0 any
    length, and an empty `precision` any precision. `spread` is the relative half-width of 90 % of the
    repeated measurements around their median.
    """

    model_fingerprint: str
    sequence: int
    precision: str
    timings: tuple[LayerTiming, ...]
    spread: float

    @cached_property
    def rows(self) -> Mapping[tuple[str, str, int], tuple[LayerTiming, ...]]:
        """Timings by (device, layer, tensor degree), rising in micro-batch size."""
        rows: dict[tuple[str, str, int], list[LayerTiming]] = defaultdict(list)
        for timing in sorted(self.timings, key=lambda timing: timing.micro_batch_size):
            rows[timing.device, timing.layer, timing.tp].append(timing)
        return {key: tuple(timings) for key, timings in rows.items()}

    def renewed(self, newer: LayerProfile) -> LayerProfile:
        """Return all rows of a `newer` profile of the same model, and this one's of other tensor degrees."""
        degrees = {timing.tp for timing in newer.timings}
        kept = tuple(timing for timing in self.timings if timing.tp not in degrees)
        if not kept:
            return newer
        # Sorting is stable: layers and sizes stay in the order of measurement.
        timings = sorted(kept + newer.timings, key=lambda timing: timing.tp)
        return replace(newer, timings=tuple(timings), spread=max(self.spread, newer.spread))


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurement:
    """Measured speeds of one device kind and its links.

    Attributes:
        device: name of the device in the cluster description.
        matmul: by precision, (flops of one product, flops/s reached), rising in size.
        memory: (bytes moved, bytes/s reached), rising in size.
        launch_s: host time per kernel.
        instruction_s: host time the executor adds per compute instruction.
        compute_slowdown: factor of a computation's time while a transfer overlaps it on its rank; at least 1.
        communication_slowdown: factor of a transfer's time while its rank computes; at least 1.
        message: (bytes of one message, seconds until it has arrived), rising, between two local ranks.
        collectives: by collective of `COLLECTIVES`, by number of ranks: (bytes of all ranks together,
            seconds), rising. Of an all-reduce they are the bytes that each rank adds.
        spread: relative half-width of 90 % of the repeated measurements around their median.
        encode, decode: (fp32 values, seconds in which one rank encodes them in 4 bits, or decodes them),
            rising; empty in older measurements.
    """

    device: str
    matmul: dict[str, tuple[tuple[float, float], ...]]
    memory: tuple[tuple[float, float], ...]
    launch_s: float
    instruction_s: float
    compute_slowdown: float
    communication_slowdown: float
    message: tuple[tuple[float, float], ...]
    collectives: dict[str, dict[int, tuple[tuple[float, float], ...]]]
    spread: float
    encode: tuple[tuple[float, float], ...] = ()
    decode: tuple[tuple[float, float], ...] = ()
