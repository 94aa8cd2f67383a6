"""Scatter charts as one small SVG: every dot says in words what it is when it is pointed at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.web.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, Scale, grid_svg, scale_of
from weft.web.svg import WIDTH, picture_svg

HEIGHT = 560
COLOURS = ("#2b6cd4", "#d4622b", "#1a7f55", "#7a4fc0", "#b0203a", "#0e8a9a", "#8a6d1a", "#8a8f98")
_LEGEND_LINE = 20
_LEGEND_COLUMNS = 4
_RADIUS = 3.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point, the words that it shows when pointed at, and an interval of `y` where there is one.

    One that is not `filled` is drawn as a ring.
    """

    x: float
    y: float
    words: str
    interval: tuple[float, float] | None = None
    filled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Dots of one kind, in one colour and with one entry in the legend."""

    name: str
    dots: tuple[Dot, ...]
    colour: str


def coloured(dots: Sequence[tuple[str, Sequence[Dot]]]) -> tuple[Cloud, ...]:
    """Clouds of these names, with one colour after the other; colours come again after the last."""
    return tuple(
        Cloud(name=name, dots=tuple(some), colour=COLOURS[place % len(COLOURS)])
        for place, (name, some) in enumerate(dots)
    )


def scatter_svg(
    clouds: Sequence[Cloud],
    across: Axis,
    up: Axis,
    *,
    title: str,
    diagonal: bool = False,
    limits: Sequence[tuple[float, str]] = (),
) -> str:
    """All dots over two axes, with a legend; `diagonal` draws where both are equal.

    `limits` are values of `across` and their names, each drawn as a dashed line from the bottom to the top.

    Colours follow the page's light or dark scheme; a chart without dots says so.
    """
    height = HEIGHT + _LEGEND_LINE * -(-len(clouds) // _LEGEND_COLUMNS) + 12
    parts = [
        f'<text class="weft-soft weft-middle" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 10}">'
        f"{escape(across.label)}</text>",
        f'<text class="weft-soft weft-middle" transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2:g}) '
        f'rotate(-90)">{escape(up.label)}</text>',
        _dots(clouds, across, up, diagonal=diagonal, limits=limits),
        *(_entry(cloud, place) for place, cloud in enumerate(clouds)),
    ]
    return picture_svg(parts, height, title=title)


def _dots(
    clouds: Sequence[Cloud],
    across: Axis,
    up: Axis,
    *,
    diagonal: bool,
    limits: Sequence[tuple[float, str]],
) -> str:
    dots = [dot for cloud in clouds for dot in cloud.dots]
    if not dots:
        middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT / 2:g}"'
        return f'<text class="weft-soft weft-middle" {middle}>nothing to show</text>'
    xs, ys = [dot.x for dot in dots], [dot.y for dot in dots]
    ys += [end for dot in dots for end in dot.interval or ()]
    both = [*xs, *ys] if diagonal else []
    xs += [value for value, _ in limits]
    wide = scale_of(across, both or xs, LEFT, WIDTH - RIGHT)
    high = scale_of(up, both or ys, HEIGHT - BOTTOM, TOP)
    parts = [grid_svg(wide, high)]
    if diagonal:
        parts.append(
            f'<path class="weft-grid" style="stroke-opacity:.6" stroke-dasharray="5 4" '
            f'd="M{wide(min(both)):.1f} {high(min(both)):.1f}L{wide(max(both)):.1f} {high(max(both)):.1f}"/>'
        )
    parts += [_limit(wide(value), name, high) for value, name in limits]
    parts += [_dot(dot, cloud.colour, wide, high) for cloud in clouds for dot in cloud.dots]
    return "".join(parts)


def _limit(x: float, name: str, high: Scale) -> str:
    return (
        f'<path class="weft-grid" style="stroke-opacity:.8" stroke-dasharray="5 4" '
        f'd="M{x:.1f} {high.end}V{high.start}"/>'
        f'<text class="weft-soft weft-end" x="{x - 4:.1f}" y="{high.end + 12:g}">{escape(name)}</text>'
    )


def _dot(dot: Dot, colour: str, wide: Scale, high: Scale) -> str:
    x, y = wide(dot.x), high(dot.y)
    bar = ""
    if dot.interval is not None:
        low, top = (high(end) for end in dot.interval)
        bar = f'<path d="M{x:.1f} {low:.1f}V{top:.1f}" stroke="{colour}" stroke-opacity=".25"/>'
    fill = f'fill="{colour}" fill-opacity=".75"' if dot.filled else f'fill="none" stroke="{colour}"'
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" {fill}/>'
    return f"<g>{bar}{circle}<title>{escape(dot.words)}</title></g>"


def _entry(cloud: Cloud, place: int) -> str:
    x = LEFT + (WIDTH - 2 * LEFT) / _LEGEND_COLUMNS * (place % _LEGEND_COLUMNS)
    y = HEIGHT + 14 + _LEGEND_LINE * (place // _LEGEND_COLUMNS)
    return (
        f'<circle cx="{x + 6:g}" cy="{y - 4}" r="{_RADIUS}" fill="{cloud.colour}"/>'
        f'<text class="weft-soft" x="{x + 16:g}" y="{y}">{escape(cloud.name)}</text>'
    )
