"""The page of `weft plan --report`: the step of every considered layout against its peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.describe.plan import precision_words
from weft.describe.units import counted, format_bytes, format_count, format_seconds
from weft.planning.advice import Advised, Mapped, SmallestChange, mapped
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate, Ranking, Verdict
from weft.planning.residuals import Lesson
from weft.planning.what_if import Forecast
from weft.timeline.figures import error_text, prediction_error
from weft.training.trials import Trial
from weft.web.charts.axes import BYTE_UNITS, SECOND_UNITS, Axis
from weft.web.charts.chart import Chart, Cloud, Dot, dots_svg
from weft.web.pages.calibration import calibration_sections, clouds_of_lesson
from weft.web.pages.page import page_html, picture_section, table_section

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


# A device with more than this times the largest peak is omitted: it would push all dots into a corner.
_IN_SIGHT = 4
_FITS, _TOO_BIG, _LEFT = "fits", "too big", "not simulated"
_COLOURS = {_FITS: "#2b6cd4", _TOO_BIG: "#d4622b", _LEFT: "#8a8f98"}
_HEAD = ("place", "layout", "step", "90 % interval", "peak memory", "against the best", "why it stands here")
_WORDS = ("layout", "against the best", "why it stands here", "best plan")


def plan_page(
    planned: PlannedJob,
    shown: Sequence[Advised],
    forecasts: Sequence[Forecast] = (),
    trials: Sequence[Trial] = (),
    lesson: Lesson | None = None,
) -> str:
    """Return a self-contained page: a dot for each layout, the shown rows, and forecasts, trials and lessons.

    A layout without a simulation is a ring, at the lower bounds of its step and memory.
    """
    ranking, job = planned.searched, planned.problem.job
    points = mapped(ranking)
    sections = [
        picture_section(
            "map", "Step of every layout against its peak memory", partial(dots_svg, _map(ranking, points))
        ),
        table_section(
            "plans", "The best", _HEAD, [_row(one, at) for at, one in enumerate(shown, start=1)], words=_WORDS
        ),
    ]
    if forecasts:
        head = (*FORECAST_HEAD, "best plan")
        rows = [
            (*row, one.reason if one.best is None else one.best.words)
            for one, row in zip(forecasts, forecast_rows(forecasts), strict=True)
        ]
        sections.append(table_section("what-if", "On another cluster", head, rows, words=_WORDS))
    if trials:
        head, rows = ("place", *TRIAL_HEAD[1:]), trial_rows(trials, lesson)
        sections.append(table_section("measured", "Measured on this machine", head, rows, words=("plan",)))
    if lesson is not None:
        sections += calibration_sections(clouds_of_lesson(lesson))
    subtitle = (
        f"{counted(job.cluster.ranks, 'device')}, global batch {job.global_batch}, "
        f"{counted(job.sequence, 'token')} per sample, "
        f"{precision_words(job)}: {len(ranking.candidates)} layouts considered, "
        f"{len(ranking.fitting)} simulated and fitting, {len(points)} drawn"
    )
    return page_html(f"Plans of {job.graph.name} on {job.cluster.name}", subtitle, sections)


def _map(ranking: Ranking, points: Sequence[Mapped]) -> Chart:
    # Draw the best layout last, on top of the others.
    best = next(iter(ranking.fitting), None)
    by_kind = {
        kind: tuple(_dot(one, best) for one in reversed(points) if _kind(one) == kind)
        for kind in reversed(_COLOURS)
    }
    most = max((one.peak_bytes for one in points), default=0)
    devices = {group.device.name: group.device.memory_bytes for group in ranking.problem.job.cluster.groups}
    return Chart(
        across=Axis(label="peak memory of the fullest device", logarithmic=True, units=BYTE_UNITS),
        up=Axis(label="step", logarithmic=True, units=SECOND_UNITS),
        title="rings: a bound or an estimate",
        drawn=[Cloud(name=kind, dots=dots, colour=_COLOURS[kind]) for kind, dots in by_kind.items() if dots],
        limits=[(float(size), name) for name, size in devices.items() if size <= _IN_SIGHT * most],
    )


def _kind(point: Mapped) -> str:
    verdict = point.candidate.verdict
    return _FITS if verdict is Verdict.FITS else _TOO_BIG if verdict is Verdict.TOO_BIG else _LEFT


def _dot(point: Mapped, best: Candidate | None) -> Dot:
    least = "" if point.simulated else "at least "
    words = (
        f"{point.candidate.words}: {least}{format_seconds(point.step_s)}, {least}"
        f"{format_bytes(point.peak_bytes)}; {point.candidate.reason}"
    )
    mark = "best plan" if point.candidate is best else ""
    return Dot(x=float(point.peak_bytes), y=point.step_s, words=words, filled=point.simulated, mark=mark)


def _row(advised: Advised, place: int) -> tuple[str, ...]:
    one = advised.candidate
    prediction, change = one.prediction, change_text(advised.smallest_change)
    return (
        str(place),
        one.words,
        "-" if prediction is None else format_seconds(prediction.step_s),
        "-" if prediction is None else prediction.interval,
        format_bytes(one.peak_bytes) if one.peak_bytes else "-",
        advised.standing.text or ("best" if place == 1 and one.verdict is Verdict.FITS else "-"),
        f"{one.reason}; {change}" if change else one.reason,
    )
