"""A picture of the peak memory of ranks against the memory of their devices."""

from __future__ import annotations

from collections.abc import Sequence

from weft.web.charts.picture import picture_svg
from weft.web.rows.plan import equal_ranks

_GUTTER, _BAR_WIDTH, _LINE, _TOP = 118, 560, 24, 40
_COLOURS = {"green": "#1a7f55", "yellow": "#a85a14", "red": "#b8473d"}


def memory_svg(peak_bytes: Sequence[int], memory_bytes: Sequence[int], *, title: str) -> str:
    """Draw the predicted peak of each rank against its memory; neighbours with equal figures share a bar."""
    lines = equal_ranks(peak_bytes, memory_bytes)
    height = _TOP + _LINE * len(lines) + 12
    parts = []
    for place, ranks in enumerate(lines):
        top = _TOP + _LINE * place
        width = min(1.0, ranks.share) * _BAR_WIDTH
        parts.append(
            f'<text class="weft-ink weft-end" x="{_GUTTER - 10}" y="{top + 13}">{ranks.name}</text>'
            f'<rect class="weft-lane" x="{_GUTTER}" y="{top}" width="{_BAR_WIDTH}" height="18"/>'
            f'<rect x="{_GUTTER}" y="{top}" width="{max(1.0, width):.1f}" height="18" '
            f'fill="{_COLOURS[ranks.colour]}"/>'
            f'<text class="weft-ink" x="{_GUTTER + _BAR_WIDTH + 10}" y="{top + 13}">{ranks.words}</text>'
        )
    return picture_svg(parts, height, title=title)
