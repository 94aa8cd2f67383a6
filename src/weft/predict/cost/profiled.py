"""Search in a layer profile for the rows of a layer and shape."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES, Device
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph
from weft.errors import InputError, Violation
from weft.predict.cost.layer_times import LayerTimes, Speeds, roofline, weight_share
from weft.predict.profile import LayerProfile, LayerTiming, value_at


class Nearness(IntEnum):
    """Nearness of a profile's rows to the micro-batch size, best first."""

    EXACTLY = 0
    BETWEEN = 1
    AT_ANOTHER_SIZE = 2


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
        InputError: when there are no rows, or several rows do not enclose the micro-batch size; it gives the
            nearest measured size.
    """
    keys = ((device, name, shape.tensor_parallel) for name in (layer.name, layer.kind))
    rows = next((profile.rows[key] for key in keys if key in profile.rows), ())
    sizes = [row.micro_batch_size for row in rows]
    if not sizes:
        raise InputError(_absent(profile, layer, shape.tensor_parallel, device))
    if len(sizes) > 1 and not sizes[0] <= shape.micro_batch_size <= sizes[-1]:
        near = sizes[0] if shape.micro_batch_size < sizes[0] else sizes[-1]
        raise InputError(
            Violation(
                "layer profile",
                f"micro-batch size {shape.micro_batch_size} is outside the measured "
                f"{sizes[0]} to {sizes[-1]}",
                str(near),
            )
        )
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
    """Return measured times of a layer, interpolated linearly between the measured micro-batch sizes.

    With one measured size, the ratio of the roofline times scales it to other sizes.

    Raises:
        InputError: as `profile_rows` does.
    """
    rows = profile_rows(profile, layer, shape, device.name)
    size = float(shape.micro_batch_size)
    # The profile has whole sequences; a context rank computes its tokens of them.
    forward_s = shape.own_part(value_at([(row.micro_batch_size, row.forward_s) for row in rows], size))
    backward_s = shape.own_part(value_at([(row.micro_batch_size, row.backward_s) for row in rows], size))
    if len(rows) == 1 and rows[0].micro_batch_size != shape.micro_batch_size:
        one = rows[0]
        now, then = (
            roofline(layer, replace(shape, micro_batch_size=count), precision, device, speeds)
            for count in (shape.micro_batch_size, one.micro_batch_size)
        )
        if then.forward_s and then.backward_s:
            forward_s = shape.own_part(one.forward_s * now.forward_s / then.forward_s)
            backward_s = shape.own_part(one.backward_s * now.backward_s / then.backward_s)
    if layer.unchanged is not None:
        # The profile measured the model's unchanged layer.
        now, then = (roofline(one, shape, precision, device, speeds) for one in (layer, layer.unchanged))
        forward_s *= now.forward_s / then.forward_s if then.forward_s else 1.0
        backward_s *= now.backward_s / then.backward_s if then.backward_s else 1.0
    update_s = value_at([(row.micro_batch_size, row.update_s) for row in rows], size)
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
    if len(rows) == 1:
        kept = rows[0].activation_bytes * shape.micro_batch_size / rows[0].micro_batch_size
    else:
        kept = value_at(
            [(row.micro_batch_size, row.activation_bytes) for row in rows], shape.micro_batch_size
        )
    if layer.unchanged is None:
        return kept
    element, before = PRECISION_BYTES[profile.precision], layer.unchanged
    now, then = (
        element * (one.kept(shape) - one.freed(shape)) + one.kept_bytes(shape) - one.freed_bytes(shape)
        for one in (layer, before)
    )
    return kept + now - then


def how_measured(profile: LayerProfile, layer: Layer, shape: Shape, device: str) -> Nearness:
    """Return the nearness of the measured rows to the shape.

    Raises:
        InputError: as `profile_rows` does.
    """
    sizes = {row.micro_batch_size for row in profile_rows(profile, layer, shape, device)}
    if shape.micro_batch_size in sizes:
        return Nearness.EXACTLY
    return Nearness.BETWEEN if len(sizes) > 1 else Nearness.AT_ANOTHER_SIZE
