"""Results of a search as text: changes that make plans fit, other clusters, measured plans."""

from __future__ import annotations

from collections.abc import Sequence

from weft.describe.units import format_count, format_seconds
from weft.planning.advice import SmallestChange
from weft.planning.planners import Candidate, Verdict
from weft.planning.residuals import Lesson
from weft.planning.what_if import Forecast
from weft.timeline.figures import error_text, prediction_error
from weft.training.trials import Trial

FORECAST_HEAD = ("cluster", "step", "against now", "tokens/s", "cost/M tokens", "the plan of now")
TRIAL_HEAD = ("", "predicted", "corrected", "measured", "spread", "error", "plan")


def change_text(change: SmallestChange | None) -> str:
    """Return the change that makes a layout fit, as text; empty if none is known."""
    return "" if change is None else f"fits with {change.words}: a step of {format_seconds(change.step_s)}"


def forecast_rows(forecasts: Sequence[Forecast]) -> list[tuple[str, ...]]:
    """Return the forecasts as rows under `FORECAST_HEAD`; an unknown step or cost is "-"."""
    return [
        (
            one.change or "as it is",
            "-" if one.step_s is None else format_seconds(one.step_s),
            "-" if one.against is None else f"{one.against - 1:+.1%}",
            "-" if one.tokens_per_s is None else format_count(one.tokens_per_s),
            "-" if one.cost_per_million_tokens is None else f"{one.cost_per_million_tokens:.3g}",
            "" if not one.change else _unchanged_text(one.unchanged),
        )
        for one in forecasts
    ]


def _unchanged_text(candidate: Candidate) -> str:
    """Return the step of the current plan on another cluster, or its verdict."""
    if candidate.verdict is Verdict.FITS:
        return format_seconds(candidate.step_s)
    return "too big" if candidate.verdict is Verdict.TOO_BIG else "cannot run"


def trial_rows(trials: Sequence[Trial], lesson: Lesson | None = None) -> list[tuple[str, ...]]:
    """Return the trials as rows under `TRIAL_HEAD`, in their order; `error` is the prediction's error."""
    return [
        (
            str(place),
            format_seconds(one.candidate.step_s),
            "-" if (better := corrected_s(one, lesson)) is None else format_seconds(better),
            str(one.outcome) if one.step_s is None else format_seconds(one.step_s),
            "-" if one.spread is None else f"+- {one.spread:.1%}",
            "-" if one.step_s is None else error_text(prediction_error(one.candidate.step_s, one.step_s)),
            one.candidate.words,
        )
        for place, one in enumerate(trials, start=1)
    ]


def corrected_s(trial: Trial, lesson: Lesson | None) -> float | None:
    """Return the trial's predicted step in seconds, corrected by all other measured plans of the lesson.

    None if the plan was not measured to the end, or is the only measured plan.
    """
    if lesson is None or len({one.plan_id for one in lesson.observations}) < 2:
        return None
    return next((one.step_s for one in lesson.left_out if one.observation == trial.observation), None)
