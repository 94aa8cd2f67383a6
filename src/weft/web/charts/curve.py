"""The curve of `weft.planning.curve` as two charts, and the text of its figures."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from weft.planning.curve import RIVALS, Curve, Method
from weft.predict.trade_off import TradeOff
from weft.web.charts.axes import Axis
from weft.web.charts.chart import Chart, Line, lines_svg

# One colour for each method; the shipped form of a rival is dashed, in the colour of the rival.
_COLOURS = ("#2b6cd4", "#d4622b", "#1a7f55", "#7a4fc0", "#8a8f98")
_SHIPPED_OF = {shipped: rival for rival, shipped in RIVALS.items()}
_MARKED_DEVICES = 3


def share_text(samples_per_device: float) -> str:
    """Return samples per device as text of a fraction, such as 1/8."""
    return str(Fraction(samples_per_device).limit_denominator(4096))


def relative_time(curve: Curve, choice: TradeOff) -> float:
    """Return the time relative to the described cluster at full utilisation with the least samples."""
    return choice.time * curve.problem.job.cluster.ranks


def fitting_methods(curve: Curve) -> list[Method]:
    """Return the methods with a fitting layout."""
    return [method for method in curve.methods if curve.utilisation(method.name)]


def curve_svg(
    curve: Curve, devices: Sequence[int], critical_batch: float, *, title: str, headed: bool = True
) -> str:
    """Draw utilisation over samples per device, and cost over time, side by side."""
    job = curve.problem.job
    shares = tuple((share, share_text(share)) for share in curve.samples_per_device)
    utilisation = Chart(
        title="Best layout of each method",
        across=Axis(label="samples per device and step", logarithmic=True, ticks=shares),
        up=Axis(label="utilisation", text="{:.0%}".format),
        drawn=tuple(
            _method_line(curve, method, tuple(curve.utilisation(method.name).items()))
            for method in curve.methods
        ),
    )
    trade_off = Chart(
        title=f"Training to a fixed loss, critical batch {critical_batch:.0f} samples",
        across=Axis(label=f"time (1: {job.cluster.ranks} devices fully used)", logarithmic=True),
        up=Axis(label="cost (1: least samples, fully used)", logarithmic=True),
        drawn=tuple(
            _trade_off_line(curve, method, devices, critical_batch) for method in fitting_methods(curve)
        ),
    )
    return lines_svg((utilisation, trade_off), title=title, headed=headed)


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
