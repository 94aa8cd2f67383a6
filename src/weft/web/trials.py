"""Trials of plans as JSON and as a table, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.describe.units import format_seconds
from weft.planning.residuals import Lesson
from weft.timeline.figures import error_text, prediction_error
from weft.training.trials import Trial

HEAD = ("", "predicted", "corrected", "measured", "spread", "error", "plan")


def trial_record(trial: Trial, lesson: Lesson | None = None) -> dict[str, Any]:
    """One trial as plain figures; None where the plan did not run.

    `corrected_step_s` is what all other measured plans of the lesson make of its prediction.
    """
    candidate = trial.candidate
    return {
        "layout": candidate.words,
        "plan_id": candidate.plan.plan_id if candidate.plan is not None else None,
        "outcome": str(trial.outcome),
        "reason": trial.reason,
        "steps": trial.steps,
        "predicted_step_s": trial.candidate.step_s,
        "corrected_step_s": _corrected_s(trial, lesson),
        "measured_step_s": trial.step_s,
        "spread": trial.spread,
        "seconds": list(trial.seconds),
    }


def trial_rows(trials: Sequence[Trial], lesson: Lesson | None = None) -> list[tuple[str, ...]]:
    """The trials as texts under `HEAD`, in the order given; `error` is that of the prediction, and
    `corrected` what all other measured plans of the lesson make of it."""
    corrected = [_corrected_s(one, lesson) for one in trials]
    return [
        (
            str(place),
            format_seconds(one.candidate.step_s),
            "-" if better is None else format_seconds(better),
            str(one.outcome) if one.step_s is None else format_seconds(one.step_s),
            "-" if one.spread is None else f"+- {one.spread:.1%}",
            "-" if one.step_s is None else error_text(prediction_error(one.candidate.step_s, one.step_s)),
            one.candidate.words,
        )
        for place, (one, better) in enumerate(zip(trials, corrected, strict=True), start=1)
    ]


def trials_table(trials: Sequence[Trial], lesson: Lesson | None = None) -> Table:
    """One trial to a row, the fastest first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in HEAD[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(HEAD[-1], overflow="fold")
    for one, row in zip(trials, trial_rows(trials, lesson), strict=True):
        words = Text(row[-1], style="bold" if one.seconds else "")
        note = one.reason if not one.seconds else f"{len(one.seconds)} of {one.steps} steps"
        words.append(f"\n{note}", style="not bold dim")
        table.add_row(*row[:-1], words, style=None if one.seconds else "dim")
    return table


def _corrected_s(trial: Trial, lesson: Lesson | None) -> float | None:
    """None where the plan was not measured to the end, or it is the only one that ever was."""
    if lesson is None or len({one.plan_id for one in lesson.observations}) < 2:
        return None
    return next((one.step_s for one in lesson.left_out if one.observation == trial.observation), None)


def _predicted_s(trial: Trial) -> float:
    return trial.candidate.step_s
