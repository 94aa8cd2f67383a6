"""Search in a layer profile for the rows of a layer and shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES, Device
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph
from weft.errors import InputError, Violation
from weft.predict.cost.layer_times import LayerTimes, Speeds, roofline, weight_share
from weft.predict.profile import LayerProfile, LayerTiming, value_at

# The least rise of a curve between measured sizes, as a part of it, that tells a slope from noise.
LEAST_RISE = 0.25
# What a doubling or halving beyond the measured micro-batch sizes adds to the half-width of a 90 % interval,
# if they are several, and if there is one. `benchmarks/profile_sizes.py` finds the share within.
HALF_WIDTHS_OF_AN_OCTAVE = (0.05, 0.10)


class Distance(NamedTuple):
    """The distance from a micro-batch size to the measured ones; distances compare by certainty.

    `octaves` counts doublings or halvings beyond all of them, or beyond the `only` one. It is 0 for one of
    them, and `between` two.
    """

    octaves: float = 0.0
    only: bool = False
    between: bool = False

    @property
    def half_width(self) -> float:
        """The half-width that the distance adds to the interval of measured sizes."""
        return HALF_WIDTHS_OF_AN_OCTAVE[self.only] * self.octaves

    @property
    def source(self) -> str:
        """The name of a prediction's source, with the distance."""
        if self.octaves:
            return "layer profile of another micro-batch size"
        return "layer profile, between its micro-batch sizes" if self.between else "layer profile"


def require_same_model(profile: LayerProfile, graph: LayerGraph, shape: Shape, precision: str) -> None:
    """Check that a profile has this model, sequence and precision.

    Raises:
        InputError: naming every difference.
    """
    wanted = (
        ("model", profile.model_fingerprint, graph.fingerprint),
        ("sequence", profile.sequence, shape.sequence),
        ("precision", profile.precision, precision),
    )
    problems = [
        Violation("layer profile", f"was taken at {name} {measured}, but {asked} is asked for", str(measured))
        for name, measured, asked in wanted
        if measured and measured != asked
    ]
    if problems:
        raise InputError(problems)


def profile_rows(profile: LayerProfile, layer: Layer, shape: Shape, device: str) -> list[LayerTiming]:
    """Return measured rows of a layer, by its name or else its kind, rising in micro-batch size.

    Raises:
        InputError: when there are no rows.
    """
    keys = ((device, name, shape.tensor_parallel) for name in (layer.name, layer.kind))
    rows = next((profile.rows[key] for key in keys if key in profile.rows), ())
    if not rows:
        raise InputError(_absent(profile, layer, shape.tensor_parallel, device))
    return list(rows)


def _absent(profile: LayerProfile, layer: Layer, tensor_parallel: int, device: str) -> Violation:
    """Return the violation for a layer that the profile lacks, or has at other tensor degrees only."""
    problem = f"has no layer {layer.kind!r} at tensor degree {tensor_parallel} on {device}"
    own = [row for row in profile.timings if row.device == device]
    if degrees := sorted({row.tp for row in own if row.layer in (layer.name, layer.kind)}):
        remedy = f"weft measure MODEL --tensor-parallel {tensor_parallel} adds it"
        problem = f"{problem}, only at {', '.join(map(str, degrees))}; {remedy}"
    else:
        problem = f"{problem}; it has {', '.join(sorted({row.layer for row in own}))}"
    return Violation("layer profile", problem)


def profiled_times(
    profile: LayerProfile, layer: Layer, shape: Shape, precision: str, device: Device, speeds: Speeds
) -> LayerTimes:
    """Return times of a layer at any micro-batch size, through those that were measured; see `at_size`.

    Raises:
        InputError: as `profile_rows` does.
    """
    rows = profile_rows(profile, layer, shape, device.name)

    def by_speeds(size: int) -> LayerTimes:
        return roofline(layer, replace(shape, micro_batch_size=size), precision, device, speeds).issued()

    def at(seconds_of: Callable[[LayerTiming | LayerTimes], float]) -> float:
        points = [(row.micro_batch_size, seconds_of(row)) for row in rows]
        # The profile has whole sequences; a context rank computes its tokens of them.
        return shape.own_part(
            at_size(points, shape.micro_batch_size, lambda size: seconds_of(by_speeds(size)))
        )

    forward_s, backward_s = at(lambda times: times.forward_s), at(lambda times: times.backward_s)
    if layer.unchanged is not None:
        # The profile measured the model's unchanged layer.
        now, then = (
            roofline(one, shape, precision, device, speeds).issued() for one in (layer, layer.unchanged)
        )
        forward_s *= now.forward_s / then.forward_s if then.forward_s else 1.0
        backward_s *= now.backward_s / then.backward_s if then.backward_s else 1.0
    # An update is that of the same parameters, whatever the micro-batch.
    updates = [(row.micro_batch_size, row.update_s) for row in rows]
    update_s = value_at(updates, min(shape.micro_batch_size, rows[-1].micro_batch_size))
    if shape.expert_parallel > 1 and (parameters := layer.parameters(replace(shape, expert_parallel=1))):
        # The profile updated all experts; an expert rank updates its own.
        update_s *= layer.parameters(shape) / parameters
    share = weight_share(layer, shape)
    return LayerTimes(forward_s, backward_s * (1.0 - share), backward_s * share, update_s)


def profiled_kept_bytes(profile: LayerProfile, layer: Layer, shape: Shape, device: str) -> float:
    """Return bytes that one micro-batch of whole sequences leaves in a layer.

    Raises:
        InputError: as `profile_rows` does.
    """
    rows = profile_rows(profile, layer, shape, device)
    measured, size = [(row.micro_batch_size, row.activation_bytes) for row in rows], shape.micro_batch_size
    kept = value_at(measured, max(size, rows[0].micro_batch_size)) * min(1.0, size / rows[0].micro_batch_size)
    if layer.unchanged is None:
        return kept
    element, before = PRECISION_BYTES[profile.precision], layer.unchanged
    now, then = (
        element * (one.kept(shape) - one.freed(shape)) + one.kept_bytes(shape) - one.freed_bytes(shape)
        for one in (layer, before)
    )
    return kept + now - then


def how_measured(profile: LayerProfile, layer: Layer, shape: Shape, device: str) -> Distance:
    """Return the distance from a shape's micro-batch size to the measured ones.

    Raises:
        InputError: as `profile_rows` does.
    """
    sizes = [row.micro_batch_size for row in profile_rows(profile, layer, shape, device)]
    size = shape.micro_batch_size
    if size in sizes:
        return Distance()
    near = min(max(size, sizes[0]), sizes[-1])
    return Distance(abs(math.log2(size / near)), only=len(sizes) == 1, between=near == size)


def at_size(points: Sequence[tuple[int, float]], size: int, curve: Callable[[int], float]) -> float:
    """Return the value at a size, through measured points that rise in size.

    Between points it is linear. Beyond them it goes from the nearest point along the `curve`. Its slope there
    is that from the first point to the last. One point alone says that it rises in proportion. No larger size
    has a smaller value. `benchmarks/profile_sizes.py` has the errors.
    """
    (least, first), (most, last) = points[0], points[-1]
    if least <= size <= most:
        return value_at(points, size)
    near, value = (least, first) if size < least else (most, last)
    there, rise = curve(near), curve(most) - curve(least)
    if there <= 0.0:
        return value
    steepest = value / there
    slope = (last - first) / rise if rise > LEAST_RISE * there else steepest
    found = value + min(max(slope, 0.0), steepest) * (curve(size) - there)
    return min(value, found) if size < least else max(value, found)
