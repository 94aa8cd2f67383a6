"""Calibration: predicted steps against measured ones with their intervals, before and after a correction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.describe.units import format_seconds
from weft.planning.residuals import Lesson
from weft.predict.corrections import count_text
from weft.predict.ledger import Entry
from weft.timeline.figures import error_text, prediction_error
from weft.web.charts import Axis
from weft.web.page import page_html, picture_section, table_section
from weft.web.scatter import Dot, coloured, scatter_svg

_HEAD = ("predictions", "steps", "median error", "inside", "interval")
_DECLARED, _LEFT_OUT = "as declared", "corrected by the other plans"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prediction with its 90 % interval and what was measured, in seconds."""

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
    """A picture of all predictions that were answered, and how true each cloud of them was.

    `of` says of what, `number` tells several on one page apart.
    """
    axes = [
        Axis(label=label, logarithmic=True, text=format_seconds)
        for label in ("measured step", "predicted step, with its 90 % interval; rings: measured outside it")
    ]
    steps = max((len(some) for _, some in clouds), default=0)
    svg = scatter_svg(
        coloured([(name, [one.dot for one in some]) for name, some in clouds]),
        *axes,
        title=f"{of}: {_steps(steps)}" if of else _steps(steps),
        diagonal=True,
    )
    yield picture_section(f"calibration-{number}", "Predicted against measured", svg)
    rows = [_row(name, some) for name, some in clouds if some]
    yield table_section(f"coverage-{number}", "How true predictions were", _HEAD, rows)


def clouds_of_lesson(lesson: Lesson) -> Clouds:
    """Every measured plan as it is predicted without a correction, and as all other plans correct it."""
    declared, corrected = [], []
    for one in lesson.left_out:
        seen, words = one.observation, f"plan {one.observation.plan_id}"
        plain_s, half = seen.predicted_step_s, seen.half_width
        ends = (plain_s * (1.0 - half), plain_s * (1.0 + half))
        declared.append(_answered(words, plain_s, *ends, seen.measured_step_s))
        corrected.append(_answered(words, one.step_s, one.low_s, one.high_s, seen.measured_step_s))
    return ((_DECLARED, declared), (_LEFT_OUT, corrected))


def lessons_page(lessons: Sequence[Lesson]) -> str:
    """A self-contained page of all that was learned on this machine."""
    sections = [
        section
        for number, one in enumerate(lessons, start=1)
        for section in calibration_sections(clouds_of_lesson(one), one.subject, number)
    ]
    subtitle = _steps(sum(len(one.observations) for one in lessons))
    return page_html("What measured steps say of predictions", subtitle, sections)


def ledger_page(entries: Sequence[Entry]) -> str:
    """A self-contained page of all predicted steps that were measured, by what they rest on."""
    clouds: dict[str, list[Answered]] = {}
    for one in entries:
        words = f"plan {one.subject}, {one.source}"
        answered = _answered(words, one.predicted, one.low, one.high, one.measured)
        # However many plans stood behind a correction.
        rests_on, corrected, _ = one.source.partition(", corrected")
        clouds.setdefault(rests_on + corrected, []).append(answered)
    sections = list(calibration_sections(sorted(clouds.items())))
    return page_html("Predictions that were measured", _steps(len(entries)), sections)


def lesson_text(lesson: Lesson) -> str:
    """What was learned, in a few lines for a terminal."""
    low, high = lesson.correction.interval(*_ends(lesson))
    count, inside = len(lesson.observations), sum(one.inside for one in lesson.left_out)
    return "\n".join(
        [
            f"{lesson.subject}: error of predictions {error_text(lesson.error)} "
            f"(median of {count_text(count)})",
            f"  corrected now: 90 % interval {low - 1.0:+.1%} to {high - 1.0:+.1%}; predicted by the others, "
            f"{inside} of {count} inside",
            f"  {_factors(lesson)}",
            f"  {lesson.path}",
        ]
    )


def lesson_record(lesson: Lesson) -> dict[str, Any]:
    """The same as plain figures; `interval` is relative to the corrected step."""
    correction = lesson.correction
    return {
        "file": str(lesson.path),
        "model": lesson.residuals.model,
        "precision": lesson.residuals.precision,
        "hardware": lesson.residuals.hardware,
        "sources": dict(correction.sources),
        "count": correction.count,
        "error": lesson.error,
        "factors": {" ".join(key).strip(): factor for key, factor in correction.factors.items()},
        "step_factor": correction.step,
        "interval": list(correction.interval(*_ends(lesson))),
        "shared": correction.shared,
        "left_out": [
            {
                "plan_id": one.observation.plan_id,
                "predicted_step_s": one.observation.predicted_step_s,
                "measured_step_s": one.observation.measured_step_s,
                "corrected_step_s": one.step_s,
                "low_s": one.low_s,
                "high_s": one.high_s,
            }
            for one in lesson.left_out
        ],
    }


def _ends(lesson: Lesson) -> tuple[float, float]:
    """The declared ends of the interval of the plans that were measured."""
    half = median(one.half_width for one in lesson.observations)
    return 1.0 - half, 1.0 + half


def _factors(lesson: Lesson) -> str:
    found = [f"{' '.join(key).strip()} {factor:.2f}" for key, factor in lesson.correction.factors.items()]
    return f"times longer: {', '.join([*found, f'all of them {lesson.correction.step:.2f}'])}"


def _answered(words: str, predicted_s: float, low_s: float, high_s: float, measured_s: float) -> Answered:
    return Answered(words=words, predicted_s=predicted_s, low_s=low_s, high_s=high_s, measured_s=measured_s)


def _row(name: str, some: Sequence[Answered]) -> tuple[str, ...]:
    error = error_text(median(one.error for one in some))
    inside = sum(one.inside for one in some) / len(some)
    half_width = median((one.high_s - one.low_s) / (2.0 * one.predicted_s) for one in some)
    return (name, str(len(some)), error, f"{inside:.0%}", f"+- {half_width:.0%}")


def _steps(count: int) -> str:
    return f"{count} measured step{'s' if count != 1 else ''}"
