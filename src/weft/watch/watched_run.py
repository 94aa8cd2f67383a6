"""`WatchedRun`: a run as its viewers see it, and what is new for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

from weft.errors import InputError, RunError
from weft.training.directory.event_words import event_words
from weft.training.directory.live_run import LiveRun, StepFigures
from weft.training.directory.overview import RunOverview, overview
from weft.watch.newest_steps import NewestStep, StepsOfPlan
from weft.web.rows.run import Figure, run_figures


class Seen(NamedTuple):
    """The part of a run that a viewer has; as text, the id of the news that brought it there.

    Attributes:
        metrics, told: hashes of the files that it was read from.
        lines, events: read lines of steps, and of events.
        step: the newest step that was shown instruction by instruction, -1 before the first.
    """

    metrics: int = 0
    told: int = 0
    lines: int = 0
    events: int = 0
    step: int = -1

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what an id means; nothing seen for a text that is no id."""
        parts = text.split(".")
        try:
            return cls(*map(int, parts)) if len(parts) == len(cls._fields) else cls()
        except ValueError:
            return cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An event in words."""

    time_s: float
    text: str
    bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A run now, and its steps and events that one viewer has not seen.

    Attributes:
        anew: the viewer has seen other files of this name, and forgets them.
        step: the newest step, instruction by instruction, if the viewer has not seen it.
        problem: the reason why no instructions can be shown; empty if they can.
    """

    overview: RunOverview
    figures: Sequence[Figure]
    interval_s: tuple[float, float, float] | None
    anew: bool
    steps: Sequence[StepFigures]
    held_out: Sequence[tuple[int, float]]
    notes: Sequence[Note]
    step: NewestStep | None
    problem: str
    seen: Seen


class WatchedRun:
    """One run directory with any number of viewers, each in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._run = LiveRun(path)
        self._of_plan: StepsOfPlan | None = None
        self._tried: str | None = None
        self._problem = ""
        self._lock = Lock()

    def overview(self) -> RunOverview:
        """Return the run at a glance.

        Raises:
            InputError: if the plan or the run file cannot be read.
        """
        with self._lock:
            self._run.look()
            return overview(self._run)

    def news(self, seen: Seen) -> News:
        """Return what has happened since.

        Raises:
            InputError: if the plan or the run file cannot be read.
        """
        with self._lock:
            run = self._run
            run.look()
            anew = seen[:2] != run.identity
            if anew:
                seen = Seen()
            about, newest = overview(run), self._newest()
            prediction = run.file.prediction
            return News(
                overview=about,
                figures=self._figures(about),
                interval_s=None
                if prediction is None
                else (prediction.step_s, prediction.step_low_s, prediction.step_high_s),
                anew=anew,
                steps=run.steps_after(seen.lines),
                held_out=run.held_out_after(seen.events),
                notes=_notes(run.events[seen.events :]),
                step=newest if newest is not None and newest.step != seen.step else None,
                problem=self._problem,
                seen=Seen(
                    *run.identity,
                    lines=run.lines,
                    events=len(run.events),
                    step=seen.step if newest is None else newest.step,
                ),
            )

    def _newest(self) -> NewestStep | None:
        """Return the newest step under the plan that the directory has now."""
        plan_id = self._run.file.plan.plan_id
        if plan_id != self._tried:
            self._tried, self._of_plan, self._problem = plan_id, None, ""
            try:
                self._of_plan = StepsOfPlan(self._run.path)
            except (InputError, RunError) as error:
                self._problem = str(error).splitlines()[0]
        return None if self._of_plan is None else self._of_plan.newest()

    def _figures(self, about: RunOverview) -> list[Figure]:
        prediction, of_plan = self._run.file.prediction, self._of_plan
        if of_plan is None:
            return run_figures(about, prediction, None, None)
        work = None if about.step_s is None else of_plan.job.throughput_of(about.step_s)
        return run_figures(about, prediction, work, of_plan.job.usable_bytes[0])


def _notes(events: Sequence[dict[str, Any]]) -> list[Note]:
    told = ((event, event_words(event)) for event in events)
    return [
        Note(time_s=float(event.get("time_s", 0.0)), text=words[0], bad=words[1])
        for event, words in told
        if words is not None
    ]
