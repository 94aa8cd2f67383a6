"""Output of all commands: JSON on standard output, or text and pictures for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from weft.cli.console import PipeConsole
from weft.describe.units import counted, format_bytes, format_count, format_seconds
from weft.destinations import require_file, require_new, require_svg
from weft.errors import InputError, Violation
from weft.files import write_whole
from weft.program.kinds import KINDS, is_compute
from weft.program.program import NONE
from weft.progress import ProgressReport, WorkDone
from weft.timeline.folded import folded_ranks
from weft.timeline.timeline import Timeline
from weft.web.charts.axes import time_ticks
from weft.web.charts.picture import kind_colour, shaded
from weft.web.charts.timeline import shade_of_rows, timeline_svg
from weft.web.rows.plan import ranks_text

MAXIMUM_LANES = 32
_NARROWEST = 20


@dataclass(frozen=True)
class TimelinePicture:
    """One lane for equal ranks: the work of their compute streams, one character per slice of time.

    Blocks are coloured and show micro-batch numbers; without colours, numbers stand above symbols of kinds.
    `span_s` is the time across the picture, so that two can share a scale; by default, that of the work.
    """

    timeline: Timeline
    span_s: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline = self.timeline
        computed = is_compute(timeline.kind) & (timeline.end_ns > timeline.start_ns)
        rows = np.flatnonzero(computed)
        if not len(rows):
            yield Text("nothing was computed")
            return
        folded = folded_ranks(timeline.take(computed))
        names = {ranks[0]: ranks_text(ranks) for ranks in folded[:MAXIMUM_LANES]}
        gutter = max(len(name) for name in names.values()) + 1
        width = max(_NARROWEST, options.max_width - gutter - 2)
        origin = int(timeline.start_ns[rows].min())
        span = round(1e9 * self.span_s) if self.span_s else int(timeline.end_ns[rows].max()) - origin
        coloured = console.is_terminal and console.color_system is not None and not console.no_color
        shades = shade_of_rows(timeline)
        for rank, name in names.items():
            mine = rows[timeline.rank[rows] == rank]
            lane = _lane(timeline, mine, origin, span, width)
            runs = [(row, len(list(cells))) for row, cells in groupby(lane)]
            head = name.ljust(gutter)
            if coloured:
                blocks = (_coloured_block(timeline, row, cells, shades) for row, cells in runs)
                yield Text(head, no_wrap=True).append_text(Text("").join(blocks))
                continue
            yield Text(
                head + "".join(_plain_block(timeline, row, cells) for row, cells in runs), no_wrap=True
            )
            symbols = ("".ljust(gutter), *(_symbol(timeline, row) * cells for row, cells in runs))
            yield Text("".join(symbols), no_wrap=True)
        if left_out := sum(len(ranks) for ranks in folded[MAXIMUM_LANES:]):
            yield Text(f"and {counted(left_out, 'more rank')}")
        yield Text(" " * gutter + _scale_line(span, width), style="dim", no_wrap=True)
        yield _kind_line(timeline, rows, coloured)
        if any(len(ranks) > 1 for ranks in folded):
            yield Text("of equal ranks, the micro-batches of the first one", style="dim")


def _lane(timeline: Timeline, rows: npt.NDArray[np.intp], origin: int, span: int, width: int) -> list[int]:
    """Return the row that runs in the middle of each cell, -1 if the rank is idle; `width` values."""
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
    # The last cell of a wide block stays empty, to separate neighbours of one colour.
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
        line.append(*mark).append(f" {kind.words}  ", style="dim")
    line.rstrip()
    return line


# An option that is off where it is left out.
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


def _refused_by(check: Callable[[Path], None]) -> Parameter:
    """Return a parameter that checks a given path while the command line is read, before any work."""
    return Parameter(validator=lambda _, path: None if path is None else check(path))


WrittenFile = Annotated[Path, _refused_by(require_file)]
WrittenPicture = Annotated[Path, _refused_by(require_svg)]
NewFolder = Annotated[Path, _refused_by(require_new)]
Json = Annotated[Flag, Parameter(name="--json", help="Answer as JSON.")]


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    print(json.dumps(value, indent=1, sort_keys=True))


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on stderr, one line each."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def write_asked(written: Sequence[tuple[Path | None, Callable[[], str]]]) -> None:
    """Write the texts for which the user has named a file."""
    for path, text in written:
        if path is None:
            continue
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # A link stays a link, and a device or a pipe takes text but cannot be replaced.
            path.write_text(text(), encoding="utf-8")
        else:
            write_whole(path, text())


def say_written(*paths: Path | None) -> None:
    """Name the files that the user has asked for."""
    for path in paths:
        if path is not None:
            print(f"wrote {path}")


def console() -> PipeConsole:
    return PipeConsole(highlight=False)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Tell what is under way, and for how long, on a terminal; nothing elsewhere.

    It yields a function that tells the newest finding beside the text.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    err = Console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda found: progress.update(task, description=f"{text}; {found}")


@contextmanager
def progressing(text: str) -> Iterator[ProgressReport]:
    """Tell the finished parts of what is under way, all of them and the time left, as `working` does."""
    pace = _Pace()
    with working(text) as tell:
        yield lambda found: tell(pace.words(found))


@contextmanager
def searching() -> Iterator[tuple[Callable[[str], None], ProgressReport]]:
    """Tell the best plan of a search so far beside its progress, as `working` does."""
    pace, told = _Pace(), {"progress": "", "best": ""}
    with working("searching layouts") as tell:

        def update(name: str, words: str) -> None:
            told[name] = words
            tell("; ".join(filter(None, told.values())))

        yield partial(update, "best"), lambda found: update("progress", pace.words(found))


class _Pace:
    """The time left of counted work, from the time of its finished parts."""

    def __init__(self) -> None:
        self._work = ""
        self._begin, self._begin_s = 0, 0.0

    def words(self, found: WorkDone) -> str:
        """Return the finished parts and all parts, with the time left once some are finished."""
        if found.work != self._work or not found.done:
            self._work, self._begin, self._begin_s = found.work, found.done, time.monotonic()
        done = found.done - self._begin
        if not done:
            return _amount(found)
        left_s = (time.monotonic() - self._begin_s) / done * (found.total - found.done)
        return f"{_amount(found)}, {format_seconds(left_s)} left"


def _amount(found: WorkDone) -> str:
    if found.unit == "bytes":
        return f"{found.work}: {format_bytes(found.done)} of {format_bytes(found.total)}"
    return f"{found.work}: {format_count(found.done)}/{format_count(found.total)} {found.unit}"


def print_timeline(timeline: Timeline, svg: Path | None, title: str) -> None:
    """Draw a timeline, and write it as a picture to `svg`, if given."""
    console().print(TimelinePicture(timeline))
    write_asked([(svg, lambda: timeline_svg(timeline, title=title))])
    say_written(svg)


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def folded_table(names: Iterable[str]) -> Table:
    """Return a table of text columns; a cell may take several lines."""
    table = plain_table()
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def ranked_table(figures: Iterable[str], words: str) -> Table:
    """Return a table of narrow figures and a last column of words, to fit 80 columns uncut."""
    table = plain_table()
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(words, overflow="fold")
    return table


def named_table(names: Sequence[str]) -> Table:
    """Return a table with names in the first column and figures in the others."""
    table = plain_table()
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place), overflow="fold")
    return table


def refuse_options(options: Mapping[str, object], problem: str) -> None:
    """Refuse the given ones of options that make no sense with the others.

    Raises:
        InputError: if one is not None; it names each of them.
    """
    if given := [name for name, value in options.items() if value is not None]:
        raise InputError([Violation(name, problem) for name in given])
