"""Calibration: predicted steps with intervals against measured steps, before and after a correction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from weft.describe.units import counted, format_seconds
from weft.planning.residuals import Lesson
from weft.predict.ledger import Entry
from weft.timeline.figures import error_text, prediction_error
from weft.web.charts.axes import SECOND_UNITS, Axis
from weft.web.charts.chart import Chart, Dot, coloured, dots_svg
from weft.web.pages.page import page_html, picture_section, table_section

_HEAD = ("predictions", "steps", "median error", "inside", "interval")
_DECLARED, _LEFT_OUT = "as declared", "corrected by the other plans"


@dataclass(frozen=True, slots=True)
class Answered:
    """A prediction with its 90 % interval and its measurement, in seconds."""

    words: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def error(self) -> float:
        return prediction_error(self.predicted_s, self.measured_s)

    @property
    def dot(self) -> Dot:
        words = (
            f"{self.words}: measured {format_seconds(self.measured_s)}, predicted "
            f"{format_seconds(self.predicted_s)} (error {error_text(self.error)}), 90 % interval "
            f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        )
        ends = (self.low_s, self.high_s)
        return Dot(x=self.measured_s, y=self.predicted_s, words=words, interval=ends, filled=self.inside)


Clouds = Sequence[tuple[str, Sequence[Answered]]]


def calibration_sections(clouds: Clouds, of: str = "", number: int = 1) -> Iterator[str]:
    """Yield a picture of all measured predictions, and a table of the errors and coverage of each cloud.

    `of` is their subject. `number` distinguishes several pictures on one page.
    """
    steps = max((len(some) for _, some in clouds), default=0)
    dots = [(name, [one.dot for one in some]) for name, some in clouds]
    title = f"{of}: {_steps(steps)}" if of else _steps(steps)
    yield against_measured(f"calibration-{number}", dots, title, rings="measured outside the interval")
    rows = [_row(name, some) for name, some in clouds if some]
    yield table_section(f"coverage-{number}", "How true predictions were", _HEAD, rows)


def against_measured(name: str, dots: Sequence[tuple[str, Sequence[Dot]]], title: str, *, rings: str) -> str:
    """Return a picture of predicted over measured steps, by group; `rings` says what is not filled."""
    across, up = (
        Axis(label=label, logarithmic=True, units=SECOND_UNITS)
        for label in ("measured step", "predicted step, with its 90 % interval")
    )
    chart = Chart(across=across, up=up, drawn=coloured(dots), diagonal=True, title=f"rings: {rings}")
    return picture_section(name, f"Predicted against measured: {title}", partial(dots_svg, chart))


def clouds_of_lesson(lesson: Lesson) -> Clouds:
    """Return each measured plan twice: predicted as declared, and corrected by all other plans."""
    declared, corrected = [], []
    for one in lesson.left_out:
        seen, words = one.observation, f"plan {one.observation.plan_id}"
        plain_s, half = seen.predicted_step_s, seen.half_width
        ends = (plain_s * (1.0 - half), plain_s * (1.0 + half))
        declared.append(Answered(words, plain_s, *ends, seen.measured_step_s))
        corrected.append(Answered(words, one.step_s, one.low_s, one.high_s, seen.measured_step_s))
    return ((_DECLARED, declared), (_LEFT_OUT, corrected))


def lessons_page(lessons: Sequence[Lesson]) -> str:
    """Return a self-contained page of all lessons of this machine."""
    sections = [
        section
        for number, one in enumerate(lessons, start=1)
        for section in calibration_sections(clouds_of_lesson(one), one.subject, number)
    ]
    subtitle = _steps(sum(len(one.observations) for one in lessons))
    return page_html("What measured steps say of predictions", subtitle, sections)


def ledger_page(entries: Sequence[Entry]) -> str:
    """Return a self-contained page of all measured predictions of steps, grouped by their source."""
    clouds: dict[str, list[Answered]] = {}
    for one in entries:
        words = f"plan {one.subject}, {one.source}"
        answered = Answered(words, one.predicted, one.low, one.high, one.measured)
        # One group for corrections by any number of plans.
        rests_on, corrected, _ = one.source.partition(", corrected")
        clouds.setdefault(rests_on + corrected, []).append(answered)
    sections = list(calibration_sections(sorted(clouds.items())))
    return page_html("Predictions that were measured", _steps(len(entries)), sections)


def _row(name: str, some: Sequence[Answered]) -> tuple[str, ...]:
    error = error_text(median(one.error for one in some))
    inside = sum(one.inside for one in some) / len(some)
    half_width = median((one.high_s - one.low_s) / (2.0 * one.predicted_s) for one in some)
    return (name, str(len(some)), error, f"{inside:.0%}", f"+- {half_width:.0%}")


def _steps(count: int) -> str:
    return counted(count, "measured step")
