"""Trials of plans as JSON and as a table, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.describe.units import format_seconds
from weft.training.trials import Trial

HEAD = ("", "predicted", "measured", "spread", "error", "plan")


def trial_record(trial: Trial) -> dict[str, Any]:
    """One trial as plain figures; None where the plan did not run."""
    candidate = trial.candidate
    return {
        "layout": str(candidate.layout),
        "plan_id": candidate.plan.plan_id if candidate.plan is not None else None,
        "outcome": str(trial.outcome),
        "reason": trial.reason,
        "steps": trial.steps,
        "predicted_step_s": _predicted_s(trial),
        "measured_step_s": trial.step_s,
        "spread": trial.spread,
        "seconds": list(trial.seconds),
    }


def trial_rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """The trials as texts under `HEAD`, in the order given; `error` is that of the prediction."""
    return [
        (
            str(place),
            format_seconds(_predicted_s(one)),
            str(one.outcome) if one.step_s is None else format_seconds(one.step_s),
            "-" if one.spread is None else f"+- {one.spread:.1%}",
            "-" if one.step_s is None else f"{_predicted_s(one) / one.step_s - 1:+.1%}",
            str(one.candidate.layout),
        )
        for place, one in enumerate(trials, start=1)
    ]


def trials_table(trials: Sequence[Trial]) -> Table:
    """One trial to a row, the fastest first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in HEAD[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(HEAD[-1], overflow="fold")
    for one, row in zip(trials, trial_rows(trials), strict=True):
        words = Text(row[-1], style="bold" if one.seconds else "")
        note = one.reason if not one.seconds else f"{len(one.seconds)} of {one.steps} steps"
        words.append(f"\n{note}", style="not bold dim")
        table.add_row(*row[:-1], words, style=None if one.seconds else "dim")
    return table


def _predicted_s(trial: Trial) -> float:
    plan = trial.candidate.plan
    assert plan is not None
    assert plan.prediction is not None, "a trial is one of a simulated plan"
    return plan.prediction.step_s
