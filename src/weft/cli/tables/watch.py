"""A run as it goes, on a terminal: the figures, curves, step, late ranks and events of its live page."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.cli.output import TimelinePicture, console, plain_table
from weft.describe.units import format_seconds
from weft.program.kinds import kind_words
from weft.timeline.compare import Comparison
from weft.timeline.figures import makespan_s
from weft.training.directory.live_run import StepFigures
from weft.training.directory.overview import RunState
from weft.watch.newest_steps import NewestStep, late_ranks
from weft.watch.watched_run import News, Note, Seen, WatchedRun
from weft.web.rows.run import BAD, GOOD, Figure

LOOK_INTERVAL_S = 1.0
_CURVE = 60
_NOTES = _RANKS = 5
_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = {GOOD: "green", BAD: "red", "": ""}
_STATES = {RunState.RUNNING: "cyan", RunState.FINISHED: "green", RunState.BROKEN_OFF: "red"}


class _Viewer:
    """A run as the terminal shows it, kept up to date."""

    def __init__(self, run: WatchedRun) -> None:
        self._run, self._seen = run, Seen()
        self._steps: list[StepFigures] = []
        self._notes: list[Note] = []
        self._newest: NewestStep | None = None

    def look(self) -> Group:
        """Return the run as it is now."""
        news = self._run.news(self._seen)
        if news.anew:
            self._steps, self._notes, self._newest = [], [], None
        if news.steps:
            self._steps = [one for one in self._steps if one.step < news.steps[0].step]
        self._steps = [*self._steps, *news.steps]
        self._notes = [*self._notes, *news.notes][-_NOTES:]
        self._newest, self._seen = news.step or self._newest, news.seen
        return Group(*_head(news), *self._curves(), *_step(self._newest), *_notes(self._notes, news.problem))

    def _curves(self) -> Iterator[RenderableType]:
        grid = _grid()
        for name, values in (
            ("loss", [one.loss for one in self._steps]),
            ("step time", [one.step_s for one in self._steps]),
        ):
            grid.add_row(name, Text(curve_text(values, _CURVE)))
        if self._steps:
            yield grid


def watch_in_terminal(run: WatchedRun) -> None:
    """Show a run until Ctrl-C; where no person looks, print it once.

    Raises:
        InputError: if the plan or the run file cannot be read.
    """
    out, viewer = console(), _Viewer(run)
    first = viewer.look()
    # Colours can be forced where no terminal is.
    if not out.file.isatty():
        out.print(first)
        return
    shown = first
    try:
        with Live(first, console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_INTERVAL_S)
                shown = viewer.look()
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        out.print(shown)


def _head(news: News) -> Iterator[RenderableType]:
    run = news.overview
    title = Text(run.path.name, style="bold").append(f"  {run.model}: {run.plan}  ", style="not bold")
    yield title.append(str(run.state), style=_STATES.get(run.state, ""))
    grid = _grid()
    grid.add_row("progress", ProgressBar(total=max(1, run.steps), completed=run.done, width=_CURVE))
    for figure in news.figures:
        grid.add_row(figure.label, _value(figure))
    yield grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=len("tensors of rank 0"))
    grid.add_column(overflow="fold")
    return grid


def _value(figure: Figure) -> Text:
    value = Text(figure.value, style=f"bold {_COLOURS[figure.tone]}")
    return value.append(f"  {figure.detail}", style="not bold default") if figure.detail else value


def curve_text(values: Sequence[float], width: int) -> str:
    """Return a curve of one line: the mean of each of at most `width` parts, between lowest and highest."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    count = min(width, len(known))
    cuts = [len(known) * place // count for place in range(count + 1)]
    parts = [known[start:end] for start, end in pairwise(cuts)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    steps = [0 if high == low else (value - low) / (high - low) * (len(_LEVELS) - 1) for value in means]
    return "".join(_LEVELS[round(step)] for step in steps)


def _step(newest: NewestStep | None) -> Iterator[RenderableType]:
    if newest is None:
        return
    sides = {"one step, predicted": newest.predicted, f"step {newest.step}, measured": newest.measured}
    span_s = max(makespan_s(timeline) for timeline in sides.values())
    for name, timeline in sides.items():
        yield Text(f"{name}: {format_seconds(makespan_s(timeline))}", style="dim")
        yield TimelinePicture(timeline, span_s)
    yield _late_table(newest.comparison)


def _late_table(comparison: Comparison) -> Table:
    """Return the latest ranks, each with the kind of instruction that makes it late."""
    table = plain_table()
    for name in ("late", "in a step", "most of it in", "predicted", "measured"):
        table.add_column(name, justify="left" if name in ("late", "most of it in") else "right")
    for rank, late_s in late_ranks(comparison, _RANKS).items():
        own = [pair for pair in comparison.ranks if pair.rank == rank]
        most = max(own, key=lambda pair: abs(pair.measured_s - pair.predicted_s))
        sign = "+" if late_s > 0 else "-"
        times = format_seconds(most.predicted_s), format_seconds(most.measured_s)
        late = f"{sign}{format_seconds(abs(late_s))}"
        table.add_row(f"rank {rank}", late, kind_words(most.kind), *times)
    return table


def _notes(notes: Sequence[Note], problem: str) -> Iterator[RenderableType]:
    if problem:
        yield Text(f"no instructions are shown: {problem}", style="yellow")
    for note in reversed(notes):
        moment = datetime.fromtimestamp(note.time_s).strftime("%H:%M:%S")
        yield Text(f"{moment}  ", style="dim").append(
            note.text, style="red not dim" if note.bad else "not dim"
        )
