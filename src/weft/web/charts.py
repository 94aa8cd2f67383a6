"""Line charts as one small SVG, in the manner of `weft.web.svg`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from weft.web.svg import WIDTH, picture_svg

HEIGHT = 400
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 66, 46
_LEGEND_LINE = 20
_LEGEND_COLUMNS = 4
_ROUND = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: points (x, y) in order of drawing; `marks` are words beside some of them, by position.

    Lines of several charts that share a name are told apart by none and share one entry of the legend.
    """

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    marks: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What an axis shows; `ticks` are (value, text), round numbers when not given."""

    label: str
    logarithmic: bool = False
    text: Callable[[float], str] = "{:g}".format
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over two axes. Linear axes begin at 0."""

    title: str
    across: Axis
    up: Axis
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """From values of an axis to pixels."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.axis.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        if self.axis.ticks:
            return [tick for tick in self.axis.ticks if self.low <= tick[0] <= self.high]
        values = _log_ticks(self.low, self.high) if self.axis.logarithmic else _linear_ticks(self.high)
        return [(value, self.axis.text(value)) for value in values]


def charts_svg(charts: Sequence[Chart], *, title: str) -> str:
    """The charts side by side under one title, with one legend for all of them.

    Colours follow the page's light or dark scheme; a chart without points says so.
    """
    names = list({line.name: line for chart in charts for line in chart.lines}.values())
    height = HEIGHT + _LEGEND_LINE * math.ceil(len(names) / _LEGEND_COLUMNS) + 12
    width = WIDTH / len(charts)
    parts = [
        *(_chart(chart, place * width, width) for place, chart in enumerate(charts)),
        _legend(names),
    ]
    return picture_svg(parts, height, title=title)


def _chart(chart: Chart, left: float, width: float) -> str:
    points = [point for line in chart.lines for point in line.points]
    head = (
        f'<text class="weft-ink" x="{left + LEFT:g}" y="{TOP - 16}">{escape(chart.title)}</text>'
        f'<text class="weft-soft weft-middle" x="{left + (LEFT + width - RIGHT) / 2:g}" y="{HEIGHT - 10}">'
        f"{escape(chart.across.label)}</text>"
        f'<text class="weft-soft weft-middle" transform="translate({left + 16:g} '
        f'{(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)">{escape(chart.up.label)}</text>'
    )
    if not points:
        middle = left + (LEFT + width - RIGHT) / 2
        return (
            head
            + f'<text class="weft-soft weft-middle" x="{middle:g}" y="{HEIGHT / 2:g}">nothing fits</text>'
        )
    across = scale_of(chart.across, [x for x, _ in points], left + LEFT, left + width - RIGHT)
    up = scale_of(chart.up, [y for _, y in points], HEIGHT - BOTTOM, TOP)
    # The first line is drawn last, so that it stays visible where another one runs along it.
    lines = [_line(line, across, up) for line in reversed(chart.lines) if line.points]
    return head + grid_svg(across, up) + "".join(lines)


def scale_of(axis: Axis, values: list[float], start: float, end: float) -> Scale:
    """Room of a twentieth at the ends, so that no point lies on the frame."""
    low, high = min(values), max(values)
    if not axis.logarithmic:
        return Scale(axis, 0.0, 1.1 * high, start, end)
    room = max((high / low) ** 0.05, 1.05)
    return Scale(axis, low / room, high * room, start, end)


def _linear_ticks(high: float, low: float = 0.0) -> list[float]:
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (*_ROUND, 10) if factor * power >= raw * 0.999)
    return [step * count for count in range(math.ceil(low / step), int(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with twice and five times them where there are few; else equal steps."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = _ROUND if math.log10(high / low) < 3 else (1,)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    inside = [value for value in values if low <= value <= high]
    return inside if len(inside) > 1 else _linear_ticks(high, low)


def grid_svg(across: Scale, up: Scale) -> str:
    parts = []
    for value, text in across.ticks():
        x = across(value)
        parts.append(
            f'<path class="weft-grid" d="M{x:.1f} {up.end}V{up.start}"/>'
            f'<text class="weft-soft weft-middle" x="{x:.1f}" y="{up.start + 15}">{escape(text)}</text>'
        )
    for value, text in up.ticks():
        y = up(value)
        parts.append(
            f'<path class="weft-grid" d="M{across.start:g} {y:.1f}H{across.end:g}"/>'
            f'<text class="weft-soft weft-end" x="{across.start - 6:g}" y="{y + 4:.1f}">{escape(text)}</text>'
        )
    return "".join(parts)


def _line(line: Line, across: Scale, up: Scale) -> str:
    places = [(across(x), up(y)) for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{line.colour}"/>' for x, y in places)
    marks = "".join(
        f'<text class="weft-soft weft-end" x="{places[at][0] - 3:.1f}" y="{places[at][1] + 14:.1f}">'
        f"{escape(text)}</text>"
        for at, text in line.marks
    )
    return f'<path d="M{path}" {_stroke(line)}/>{dots}{marks}'


def _stroke(line: Line) -> str:
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    return f'fill="none" stroke="{line.colour}" stroke-width="1.8"{dashes}'


def _legend(lines: Sequence[Line]) -> str:
    parts = []
    column = (WIDTH - 2 * LEFT) / _LEGEND_COLUMNS
    for place, line in enumerate(lines):
        x = LEFT + column * (place % _LEGEND_COLUMNS)
        y = HEIGHT + 14 + _LEGEND_LINE * (place // _LEGEND_COLUMNS)
        parts.append(
            f'<path d="M{x:g} {y - 4}H{x + 26:g}" {_stroke(line)}/>'
            f'<text class="weft-soft" x="{x + 33:g}" y="{y}">{escape(line.name)}</text>'
        )
    return "".join(parts)
