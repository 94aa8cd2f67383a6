"""Charts of lines or dots as one small SVG; a dot under the pointer shows its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.web.charts.axes import Axis, Scale, grid_svg, scale_of
from weft.web.charts.picture import WIDTH, picture_svg

_COLOURS = ("#2b6cd4", "#d4622b", "#1a7f55", "#7a4fc0", "#b0203a", "#0e8a9a", "#8a6d1a", "#8a8f98")
_LEFT, _RIGHT, _BOTTOM = 78, 16, 46
_LEGEND_LINE = 20
_LEGEND_COLUMNS = 4
_RADIUS = 3.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: points (x, y) in drawing order; `marks` are (index of a point, text next to it).

    Lines with the same name in several charts share one entry of the legend.
    """

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    marks: tuple[tuple[int, str], ...] = ()

    def svg(self, across: Scale, up: Scale) -> str:
        places = [(across(x), up(y)) for x, y in self.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{self.colour}"/>' for x, y in places)
        words = 'class="weft-soft weft-end weft-halo"'
        marks = "".join(
            f'<text {words} x="{x - 3:.1f}" y="{y + 14:.1f}">{escape(text)}</text>'
            for (x, y), text in ((places[at], text) for at, text in self.marks)
        )
        return self._path(path) + dots + marks

    def entry(self, x: float, y: int) -> str:
        return f"{self._path(f'{x:g} {y - 4}H{x + 26:g}')}{_entry_text(self.name, x + 33, y)}"

    def _path(self, path: str) -> str:
        dashes = ' stroke-dasharray="5 4"' if self.dashed else ""
        return f'<path d="M{path}" fill="none" stroke="{self.colour}" stroke-width="1.8"{dashes}/>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point, its tooltip (`words`) and an interval of `y` or None; drawn as a ring if not `filled`.

    A `mark` is a word next to the dot, which then has a second ring around it.
    """

    x: float
    y: float
    words: str
    interval: tuple[float, float] | None = None
    filled: bool = True
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Dots of one kind, with one colour and one entry in the legend."""

    name: str
    dots: tuple[Dot, ...]
    colour: str

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The dots and the ends of their intervals."""
        return tuple((dot.x, y) for dot in self.dots for y in (dot.y, *(dot.interval or ())))

    def svg(self, across: Scale, up: Scale) -> str:
        return "".join(self._dot(dot, across(dot.x), up) for dot in self.dots)

    def entry(self, x: float, y: int) -> str:
        ring = bool(self.dots) and not any(dot.filled for dot in self.dots)
        fill = f'fill="none" stroke="{self.colour}"' if ring else f'fill="{self.colour}"'
        circle = f'<circle cx="{x + 6:g}" cy="{y - 4}" r="{_RADIUS}" {fill}/>'
        return circle + _entry_text(self.name, x + 16, y)

    def _dot(self, dot: Dot, x: float, up: Scale) -> str:
        bar, colour = "", self.colour
        if dot.interval is not None:
            low, high = (up(end) for end in dot.interval)
            bar = f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-opacity=".5"/>'
        fill = f'fill="{colour}" fill-opacity=".75"' if dot.filled else f'fill="none" stroke="{colour}"'
        y = up(dot.y)
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" {fill}/>'
        return f"<g>{bar}{circle}{_mark(dot.mark, x, y)}<title>{escape(dot.words)}</title></g>"


def _mark(text: str, x: float, y: float) -> str:
    if not text:
        return ""
    ring = f"M{x - 8:.1f} {y:.1f}a8 8 0 1 0 16 0a8 8 0 1 0 -16 0"
    word = f'<text class="weft-ink weft-middle weft-halo" x="{x:.1f}" y="{y + 22:.1f}">{escape(text)}</text>'
    return f'<path class="weft-mark" d="{ring}"/>{word}'


def coloured(dots: Sequence[tuple[str, Sequence[Dot]]]) -> tuple[Cloud, ...]:
    """Return a cloud for each (name, dots); colours repeat after the eighth cloud."""
    return tuple(
        Cloud(name=name, dots=tuple(some), colour=_COLOURS[place % len(_COLOURS)])
        for place, (name, some) in enumerate(dots)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines or clouds over two axes. Linear axes begin at 0.

    `diagonal` draws the line of equal values on both axes. `limits` are (value of `across`, name), each
    drawn as a dashed vertical line.
    """

    across: Axis
    up: Axis
    drawn: Sequence[Line | Cloud]
    title: str = ""
    diagonal: bool = False
    limits: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    """The differences between charts of lines and dots; `order` is the drawing order (1 or -1)."""

    top: int
    height: int
    label_x: int
    nothing: str
    order: int


# The first line is drawn last: it stays visible where another line overlaps it.
_LINES = _Frame(66, 400, 16, "nothing fits", -1)
_DOTS = _Frame(66, 560, 14, "nothing to show", 1)


def lines_svg(charts: Sequence[Chart], *, title: str, headed: bool = True) -> str:
    """Draw charts of lines side by side under one title, with one common legend.

    Colours follow the page's light or dark scheme. A chart without points says "nothing fits".
    """
    return _picture(charts, _LINES, title, headed)


def dots_svg(chart: Chart, *, title: str, headed: bool = True) -> str:
    """Draw a chart of clouds with its legend, in the style of `lines_svg`; the last cloud lies on top."""
    return _picture([chart], _DOTS, title, headed)


def _picture(charts: Sequence[Chart], frame: _Frame, title: str, headed: bool) -> str:
    named = {one.name: one for chart in charts for one in chart.drawn}
    width = WIDTH / len(charts)
    parts = [_chart(chart, frame, place * width, width) for place, chart in enumerate(charts)]
    column = (WIDTH - 2 * _LEFT) / _LEGEND_COLUMNS
    for place, one in enumerate(named.values()):
        line, at = divmod(place, _LEGEND_COLUMNS)
        parts.append(one.entry(_LEFT + column * at, frame.height + 14 + _LEGEND_LINE * line))
    height = frame.height + _LEGEND_LINE * -(-len(named) // _LEGEND_COLUMNS) + 12
    return picture_svg(parts, height, title=title, headed=headed)


def _chart(chart: Chart, frame: _Frame, left: float, width: float) -> str:
    middle = f'class="weft-soft weft-middle" x="{left + (_LEFT + width - _RIGHT) / 2:g}"'
    head = f'<text class="weft-ink" x="{left + _LEFT:g}" y="{frame.top - 16}">{escape(chart.title)}</text>'
    labels = (
        f'<text {middle} y="{frame.height - 10}">{escape(chart.across.label)}</text>'
        f'<text class="weft-soft weft-middle" transform="translate({left + frame.label_x:g} '
        f'{(frame.top + frame.height - _BOTTOM) / 2:g}) rotate(-90)">{escape(chart.up.label)}</text>'
    )
    parts = [head if chart.title else "", labels]
    points = [point for one in chart.drawn for point in one.points]
    if not points:
        return "".join([*parts, f'<text {middle} y="{frame.height / 2:g}">{frame.nothing}</text>'])
    xs, ys = [x for x, _ in points], [y for _, y in points]
    both = [*xs, *ys] if chart.diagonal else []
    xs += [value for value, _ in chart.limits]
    across = scale_of(chart.across, both or xs, left + _LEFT, left + width - _RIGHT)
    up = scale_of(chart.up, both or ys, frame.height - _BOTTOM, frame.top)
    parts.append(grid_svg(across, up))
    if both:
        ends = "L".join(f"{across(value):.1f} {up(value):.1f}" for value in (min(both), max(both)))
        parts.append(_dashed(f"M{ends}", ".6"))
    parts += [_limit(across(value), name, up) for value, name in chart.limits]
    parts += [one.svg(across, up) for one in chart.drawn[:: frame.order] if one.points]
    return "".join(parts)


def _limit(x: float, name: str, up: Scale) -> str:
    text = f'<text class="weft-soft weft-end" x="{x - 4:.1f}" y="{up.end + 12:g}">{escape(name)}</text>'
    return _dashed(f"M{x:.1f} {up.end}V{up.start}", ".8") + text


def _dashed(path: str, opacity: str) -> str:
    return f'<path class="weft-grid" style="stroke-opacity:{opacity}" stroke-dasharray="5 4" d="{path}"/>'


def _entry_text(name: str, x: float, y: int) -> str:
    return f'<text class="weft-soft" x="{x:g}" y="{y}">{escape(name)}</text>'
