"""A table of numbers as colours: one cell per row and column, with its number in a tooltip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.web.charts.picture import WIDTH, picture_svg

_LEFT, _TOP, _RIGHT = 110, 66, 12
_HIGHEST, _LEAST_TEXT = 30, 46
_GAP = 1.0
# Blue, as long as usual, to red.
_COOL, _USUAL, _HOT = (43, 108, 212), (104, 110, 120), (176, 32, 58)
# Relative distance from the usual value at which a colour is full.
_FULL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Values by row and column, as shares of a usual value (1.0). `words` has the tooltip of each cell."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    words: Sequence[Sequence[str]]
    note: str = ""


def heat_map_svg(found: HeatMap, *, title: str, headed: bool = True) -> str:
    """Draw the cells in colours: red above the usual value, blue below; wide ones also show the number."""
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(found.columns))
    parts = [
        f'<text class="weft-soft" x="{_LEFT}" y="{_TOP - 12}">{escape(_ends(found.columns))}</text>',
    ]
    for row, (name, values, words) in enumerate(zip(found.rows, found.values, found.words, strict=True)):
        top = _TOP + row * _HIGHEST
        parts.append(
            f'<text class="weft-ink weft-end" x="{_LEFT - 10}" y="{top + _HIGHEST / 2 + 4:g}">'
            f"{escape(name)}</text>"
        )
        for column, (value, text) in enumerate(zip(values, words, strict=True)):
            left = _LEFT + column * width
            shown = f"{value:.0%}" if width >= _LEAST_TEXT else ""
            parts.append(
                f'<g><rect x="{left:.1f}" y="{top}" width="{max(0.5, width - _GAP):.1f}" '
                f'height="{_HIGHEST - _GAP:g}" fill="{_colour(value)}"/>'
                f'<text class="weft-block" x="{left + width / 2:.1f}" y="{top + 19}">{shown}</text>'
                f"<title>{escape(text)}</title></g>"
            )
    bottom = _TOP + len(found.rows) * _HIGHEST
    if found.note:
        parts.append(f'<text class="weft-soft" x="{_LEFT}" y="{bottom + 18}">{escape(found.note)}</text>')
    return picture_svg(parts, bottom + 32, title=title, headed=headed)


def _ends(columns: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((columns[0], columns[-1]))) if columns else ""


def _colour(value: float) -> str:
    share = max(-1.0, min(1.0, (value - 1.0) / _FULL))
    full = _HOT if share > 0 else _COOL
    mixed = (round(usual + abs(share) * (most - usual)) for usual, most in zip(_USUAL, full, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
