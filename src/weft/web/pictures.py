"""Pictures for terminals: a timeline, the table of ranked plans. SVG comes from `weft.web.svg`.

Everything is a rich renderable that fits the width it is given, and stays readable without colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from weft.describe.units import format_bytes, format_seconds
from weft.program.kinds import KINDS, is_compute
from weft.program.program import NONE
from weft.timeline.timeline import Timeline
from weft.web.colours import kind_colour, shaded
from weft.web.lanes import shade_of_rows
from weft.web.scale import time_ticks

MAXIMUM_LANES = 32
_NARROWEST = 20


@dataclass(frozen=True)
class TimelinePicture:
    """One lane per rank: what its compute stream did, a character per slice of time."""

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline = self.timeline
        rows = np.flatnonzero(is_compute(timeline.kind) & (timeline.end_ns > timeline.start_ns))
        if not len(rows):
            yield Text("nothing was computed")
            return
        ranks = np.unique(timeline.rank[rows])
        gutter = len(f"rank {ranks[-1]} ")
        width = max(_NARROWEST, options.max_width - gutter - 2)
        origin = int(timeline.start_ns[rows].min())
        span = int(timeline.end_ns[rows].max()) - origin
        coloured = console.is_terminal and console.color_system is not None and not console.no_color
        shades = shade_of_rows(timeline)
        for rank in ranks[:MAXIMUM_LANES].tolist():
            mine = rows[timeline.rank[rows] == rank]
            lane = _lane(timeline, mine, origin, span, width)
            runs = [(row, len(list(cells))) for row, cells in groupby(lane)]
            head = f"rank {rank}".ljust(gutter)
            if coloured:
                blocks = (_coloured_block(timeline, row, cells, shades) for row, cells in runs)
                yield Text(head, no_wrap=True).append_text(Text("").join(blocks))
                continue
            yield Text(
                head + "".join(_plain_block(timeline, row, cells) for row, cells in runs), no_wrap=True
            )
            symbols = ("".ljust(gutter), *(_symbol(timeline, row) * cells for row, cells in runs))
            yield Text("".join(symbols), no_wrap=True)
        if len(ranks) > MAXIMUM_LANES:
            yield Text(f"and {len(ranks) - MAXIMUM_LANES} more ranks")
        yield Text(" " * gutter + _scale_line(span, width), style="dim", no_wrap=True)
        yield _kind_line(timeline, rows, coloured)


def timeline_picture(timeline: Timeline) -> TimelinePicture:
    """A picture for `rich`: coloured blocks with micro-batch digits; without colours, digits above kinds."""
    return TimelinePicture(timeline)


def _lane(timeline: Timeline, rows: npt.NDArray[np.intp], origin: int, span: int, width: int) -> list[int]:
    """The row that runs in the middle of each cell, -1 where the rank is idle."""
    rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
    middle = origin + (np.arange(width) + 0.5) * (span / width)
    at = np.searchsorted(timeline.start_ns[rows], middle, side="right") - 1
    running = (at >= 0) & (timeline.end_ns[rows[at]] > middle)
    lane: list[int] = np.where(running, rows[at], NONE).tolist()
    return lane


def _coloured_block(timeline: Timeline, row: int, cells: int, shades: npt.NDArray[np.float64]) -> Text:
    if row < 0:
        return Text(" " * cells)
    number = _number(timeline, row)
    # The last cell of a wide block stays empty, so that neighbours of one colour are told apart.
    text = number if len(number) < cells or cells == 1 == len(number) else ""
    colour = shaded(kind_colour(KINDS[int(timeline.kind[row])].name), float(shades[row]))
    return Text(text.rjust((cells + len(text)) // 2).ljust(cells), style=f"#ffffff on {colour}")


def _plain_block(timeline: Timeline, row: int, cells: int) -> str:
    if row < 0:
        return " " * cells
    number = _number(timeline, row)
    return number.ljust(cells, "-") if len(number) <= cells else "-" * cells


def _number(timeline: Timeline, row: int) -> str:
    micro_batch = int(timeline.micro_batch[row])
    return str(micro_batch) if micro_batch != NONE else _symbol(timeline, row)


def _symbol(timeline: Timeline, row: int) -> str:
    return KINDS[int(timeline.kind[row])].symbol[0] if row >= 0 else " "


def _scale_line(span: int, width: int) -> str:
    line = [" "] * (width + 2)
    for at, text in time_ticks(span, most=max(3, width // 14)):
        place = round(at / span * width)
        text = f"|{text}"
        if place + len(text) <= len(line):
            line[place : place + len(text)] = text
    return "".join(line).rstrip()


def _kind_line(timeline: Timeline, rows: npt.NDArray[np.intp], coloured: bool) -> Text:
    line = Text()
    for code in np.unique(timeline.kind[rows]).tolist():
        kind = KINDS[code]
        mark = ("  ", f"on {kind_colour(kind.name)}") if coloured else (kind.symbol, "")
        line.append(*mark).append(f" {kind.name.replace('_', ' ')}  ", style="dim")
    line.rstrip()
    return line


def plans_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Ranked plans, best first.

    Each row has `name`, `step_s`, `low`, `high`, `peak_bytes` (None where the plan was not simulated),
    `memory_bytes`, `fits` and `reason`.
    """
    # Narrow figures first and the words last, so that 80 columns cut nothing off.
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "step", "90 % interval", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan, and why it stands here", overflow="fold")
    for place, row in enumerate(rows, start=1):
        simulated = row["step_s"] is not None
        interval = f"{format_seconds(row['low'])} - {format_seconds(row['high'])}" if simulated else "-"
        words = Text(row["name"], style="bold" if row["fits"] else "")
        if row["reason"]:
            words.append(f"\n{row['reason']}", style="not bold dim")
        table.add_row(
            str(place),
            format_seconds(row["step_s"]) if simulated else "-",
            interval,
            _peak_text(row["peak_bytes"], row["memory_bytes"]),
            words,
            style=None if row["fits"] else "dim",
        )
    return table


def _peak_text(peak_bytes: int | None, memory_bytes: int) -> str:
    return "-" if peak_bytes is None else f"{format_bytes(peak_bytes)} ({peak_bytes / memory_bytes:.0%})"
