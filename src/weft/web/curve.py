"""The curve of `weft.planning.curve` as tables for terminals, as plain figures and as two charts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.describe.units import format_bytes, format_seconds
from weft.planning.curve import Curve, CurvePoint
from weft.planning.methods import RIVALS, Method
from weft.predict.trade_off import TradeOff
from weft.web.candidates import candidate_record
from weft.web.charts import Axis, Chart, Line, charts_svg

# One colour for each method; a rival as shipped has the colour of the rival and is dashed.
_COLOURS = ("#2b6cd4", "#d4622b", "#1a7f55", "#7a4fc0", "#8a8f98")
_SHIPPED_OF = {shipped: rival for rival, shipped in RIVALS.items()}
_MARKED_DEVICES = 3


def share_text(samples_per_device: float) -> str:
    """Samples per device as a fraction: 1/8."""
    return str(Fraction(samples_per_device).limit_denominator(4096))


def curve_record(curve: Curve, devices: Sequence[int], critical_batch: float) -> dict[str, Any]:
    """Plain figures; None where no layout fits. Times and costs are relative, as in `trade_off_table`."""
    return {
        "critical_batch": critical_batch,
        "points": [_point_record(point) for point in curve.points],
        "trade_off": [
            {
                "method": method.name,
                "devices": choice.devices,
                "samples_per_device": choice.samples_per_device,
                "utilisation": choice.utilisation,
                "cost": choice.cost,
                "time": relative_time(curve, choice),
            }
            for method in _fitting(curve)
            for choice in curve.trade_offs(method.name, devices, critical_batch)
        ],
    }


def relative_time(curve: Curve, choice: TradeOff) -> float:
    """Time over that of the described cluster at full utilisation with the least samples."""
    return choice.time * curve.problem.job.cluster.ranks


def utilisation_table(curve: Curve) -> Table:
    """Utilisation of each method by samples per device, the best in bold."""
    table = _table("method", [share_text(share) for share in curve.samples_per_device])
    best = {
        share: max(curve.point(method.name, share).utilisation for method in curve.methods)
        for share in curve.samples_per_device
    }
    for method in curve.methods:
        points = [curve.point(method.name, share) for share in curve.samples_per_device]
        cells = [
            "-"
            if point.candidate is None
            else _emphasised(f"{point.utilisation:.1%}", point.utilisation == best[point.samples_per_device])
            for point in points
        ]
        table.add_row(method.name, *cells)
    return table


def layouts_table(curve: Curve) -> Table:
    """The layout that each utilisation stands for, or why there is none."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    # Narrow figures first and the words last, so that 80 columns cut nothing off.
    for name in ("samples", "step", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best layout, and why it stands here", overflow="fold")
    for share in curve.samples_per_device:
        for method in curve.methods:
            point = curve.point(method.name, share)
            words = Text(method.name, style="bold")
            step, peak = "-", "-"
            if point.candidate is not None:
                step, peak = format_seconds(point.step_s), format_bytes(point.candidate.peak_bytes)
                words.append(f"\n{point.candidate.words}", style="not bold")
            words.append(f"\n{point.reason}", style="not bold dim")
            table.add_row(share_text(share), step, peak, words)
    return table


def trade_off_table(curve: Curve, devices: Sequence[int], critical_batch: float) -> Table:
    """Cost of training on larger clusters, with the cheapest batch of each method.

    A cost of 1 is that of the least samples at full utilisation; a time of 1 is what they take on the
    described cluster.
    """
    table = _table("devices", [str(count) for count in devices])
    chosen = {method: curve.trade_offs(method.name, devices, critical_batch) for method in _fitting(curve)}
    least = [min(choices, key=lambda choice: choice.cost) for choices in zip(*chosen.values(), strict=True)]
    for method, choices in chosen.items():
        cells = [
            _emphasised(f"{choice.cost:.3g} at {share_text(choice.samples_per_device)}", choice == best)
            for choice, best in zip(choices, least, strict=True)
        ]
        table.add_row(method.name, *cells)
    table.add_row("least time", *(f"{relative_time(curve, choice):.3g}" for choice in least), style="dim")
    return table


def curve_svg(curve: Curve, devices: Sequence[int], critical_batch: float) -> str:
    """Utilisation over samples per device, and cost over time, side by side."""
    job = curve.problem.job
    shares = tuple((share, share_text(share)) for share in curve.samples_per_device)
    utilisation = Chart(
        title="Best layout of each method",
        across=Axis(label="samples per device and step", logarithmic=True, ticks=shares),
        up=Axis(label="utilisation", text="{:.0%}".format),
        lines=tuple(
            _method_line(curve, method, tuple(curve.utilisation(method.name).items()))
            for method in curve.methods
        ),
    )
    trade_off = Chart(
        title=f"Training to a fixed loss, critical batch {critical_batch:.0f} samples",
        across=Axis(label=f"time (1: {job.cluster.ranks} devices fully used)", logarithmic=True),
        up=Axis(label="cost (1: least samples, fully used)", logarithmic=True),
        lines=tuple(_trade_off_line(curve, method, devices, critical_batch) for method in _fitting(curve)),
    )
    return charts_svg(
        (utilisation, trade_off), title=f"{job.graph.name} on {job.cluster.name}, {job.precision}"
    )


def _trade_off_line(curve: Curve, method: Method, devices: Sequence[int], critical_batch: float) -> Line:
    choices = curve.trade_offs(method.name, devices, critical_batch)
    points = tuple((relative_time(curve, choice), choice.cost) for choice in choices)
    if method != curve.methods[0]:
        return _method_line(curve, method, points)
    marked = tuple((at, str(devices[at])) for at in range(0, len(devices), _MARKED_DEVICES))
    return _method_line(curve, method, points, marked)


def _method_line(
    curve: Curve,
    method: Method,
    points: tuple[tuple[float, float], ...],
    marks: tuple[tuple[int, str], ...] = (),
) -> Line:
    base = _SHIPPED_OF.get(method, method)
    bases = list(dict.fromkeys(_SHIPPED_OF.get(each, each) for each in curve.methods))
    colour = _COLOURS[bases.index(base) % len(_COLOURS)]
    return Line(name=method.name, colour=colour, points=points, dashed=base != method, marks=marks)


def _fitting(curve: Curve) -> list[Method]:
    return [method for method in curve.methods if curve.utilisation(method.name)]


def _point_record(point: CurvePoint) -> dict[str, Any]:
    record = {
        "method": point.method.name,
        "samples_per_device": point.samples_per_device,
        "utilisation": None if point.candidate is None else point.utilisation,
        "reason": point.reason,
    }
    if point.candidate is not None:
        record.update(
            {key: value for key, value in candidate_record(point.candidate).items() if key not in record}
        )
    return record


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _emphasised(text: str, best: bool) -> str:
    return f"[bold]{text}[/bold]" if best else text
