"""Peak memory of ranks against what their devices have: bars for terminals and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from weft.describe.units import format_bytes
from weft.web.svg import picture_svg

_BAR = 32
_GUTTER, _BAR_WIDTH, _LINE, _TOP = 118, 560, 24, 40
_TIGHT = 0.9
_COLOURS = {"green": "#1a7f55", "yellow": "#a85a14", "red": "#b8473d"}


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Neighbours with equal figures."""

    first: int
    count: int
    peak_bytes: int
    memory_bytes: int

    @property
    def name(self) -> str:
        last = self.first + self.count - 1
        return f"rank {self.first}" if self.count == 1 else f"ranks {self.first}-{last}"

    @property
    def share(self) -> float:
        return self.peak_bytes / self.memory_bytes

    @property
    def colour(self) -> str:
        return "red" if self.share > 1 else "yellow" if self.share > _TIGHT else "green"

    @property
    def words(self) -> str:
        return f"{format_bytes(self.peak_bytes)} of {format_bytes(self.memory_bytes)} ({self.share:.0%})"


def memory_bars(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> Table:
    """Predicted peak of each rank against its memory; neighbours with equal figures share a line."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for ranks in _joined(peak_bytes, memory_bytes):
        filled = min(_BAR, max(1, round(ranks.share * _BAR)))
        bar = Text("#" * filled, style=ranks.colour).append("." * (_BAR - filled), style="dim")
        table.add_row(ranks.name, bar, ranks.words)
    return table


def memory_svg(peak_bytes: Sequence[int], memory_bytes: Sequence[int], *, title: str) -> str:
    """The same as a picture."""
    lines = _joined(peak_bytes, memory_bytes)
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


def _joined(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> list[_Ranks]:
    joined: list[_Ranks] = []
    first = 0
    for (peak, memory), equal in groupby(zip(peak_bytes, memory_bytes, strict=True)):
        count = len(list(equal))
        joined.append(_Ranks(first, count, peak, memory))
        first += count
    return joined
