"""Horizontal bars with their names and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.web.charts.picture import WIDTH, picture_svg

_LEFT, _TOP, _RIGHT, _HEIGHT = 210, 44, 96, 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A value of at least 0, its name on the left and its number on the right."""

    name: str
    value: float
    text: str
    colour: str = "#2b6cd4"


def bars_svg(bars: Sequence[Bar], *, title: str, headed: bool = True) -> str:
    """Draw the bars from the same zero, in their order."""
    scale = (WIDTH - _LEFT - _RIGHT) / max([bar.value for bar in bars if bar.value > 0.0] or [1.0])
    parts = []
    for row, bar in enumerate(bars):
        top, length = _TOP + row * _HEIGHT, max(0.0, bar.value) * scale
        parts.append(
            f'<text class="weft-ink weft-end" x="{_LEFT - 10}" y="{top + 16}">{escape(bar.name)}</text>'
            f'<rect x="{_LEFT}" y="{top + 3}" width="{length:.1f}" height="{_HEIGHT - 8}" rx="2" '
            f'fill="{bar.colour}"/>'
            f'<text class="weft-soft" x="{_LEFT + length + 8:.1f}" y="{top + 16}">{escape(bar.text)}</text>'
        )
    return picture_svg(parts, _TOP + len(bars) * _HEIGHT + 12, title=title, headed=headed)
