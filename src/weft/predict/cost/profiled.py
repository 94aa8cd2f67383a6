"""Finding the rows of a layer profile that answer a question, or saying why there are none."""

from __future__ import annotations

from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.errors import InputError, Violation
from weft.predict.profile import LayerProfile, LayerTiming


def require_same_model(profile: LayerProfile, graph: LayerGraph, shape: Shape, precision: str) -> None:
    """Refuse a profile that was taken of something else.

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
        if measured != asked
    ]
    if problems:
        raise InputError(problems)


def profile_rows(profile: LayerProfile, kind: str, shape: Shape, device: str) -> list[LayerTiming]:
    """Measured rows of a layer kind, rising in micro-batch size, if they enclose the shape's.

    Raises:
        InputError: when they do not, with the nearest measured size.
    """
    rows = [
        row
        for row in profile.timings
        if (row.device, row.layer, row.tp) == (device, kind, shape.tensor_parallel)
    ]
    sizes = sorted(row.micro_batch_size for row in rows)
    if not sizes:
        known = sorted({row.layer for row in profile.timings if row.device == device})
        raise InputError(
            Violation(
                "layer profile",
                f"has no layer {kind!r} at tensor degree {shape.tensor_parallel} on {device}; "
                f"it has {', '.join(known)}",
            )
        )
    if not sizes[0] <= shape.micro_batch_size <= sizes[-1]:
        near = sizes[0] if shape.micro_batch_size < sizes[0] else sizes[-1]
        raise InputError(
            Violation(
                "layer profile",
                f"micro-batch size {shape.micro_batch_size} is outside the measured "
                f"{sizes[0]} to {sizes[-1]}",
                str(near),
            )
        )
    return sorted(rows, key=lambda row: row.micro_batch_size)
