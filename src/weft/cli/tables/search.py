"""Forecasts on other clusters and measured plans of a search, as tables and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.cli.output import named_table, ranked_table
from weft.cli.tables.candidates import candidate_record
from weft.describe.units import format_bytes
from weft.moves.registry import kept_out
from weft.planning.planners import Verdict
from weft.planning.problem import Problem
from weft.planning.residuals import Lesson
from weft.planning.what_if import Forecast
from weft.training.trials import Trial
from weft.web.pages.search import (
    FORECAST_HEAD,
    TRIAL_HEAD,
    corrected_s,
    forecast_rows,
    trial_rows,
)


def kept_out_record(problem: Problem) -> dict[str, str]:
    """Return the moves that the contract of the goal excludes from a search, each with its own contract."""
    return {move.name: move.contract.word for move in kept_out(problem.contract)}


def forecast_record(forecast: Forecast) -> dict[str, Any]:
    """Return one cluster's forecast as plain figures; None if no layout fits or no device has a price."""
    unchanged = forecast.unchanged
    return {
        "change": forecast.change,
        "devices": forecast.cluster.ranks,
        "step_s": forecast.step_s,
        "against": forecast.against,
        "tokens_per_s": forecast.tokens_per_s,
        "cost_per_million_tokens": forecast.cost_per_million_tokens,
        "reason": forecast.reason,
        "best": None if forecast.best is None else candidate_record(forecast.best),
        "unchanged": candidate_record(unchanged),
    }


def forecasts_table(forecasts: Sequence[Forecast]) -> Group:
    """Return a table of figures, one row per cluster, and the best plan of each."""
    priced = any(one.cost_per_million_tokens is not None for one in forecasts)
    shown = [place for place, name in enumerate(FORECAST_HEAD) if priced or not name.startswith("cost")]
    figures = named_table([FORECAST_HEAD[place] for place in shown])
    plans = Table.grid(padding=(0, 2))
    plans.add_column(overflow="fold", ratio=1)
    plans.add_column(overflow="fold", ratio=3)
    for forecast, row in zip(forecasts, forecast_rows(forecasts), strict=True):
        figures.add_row(*(row[place] for place in shown), style=None if forecast.best else "dim")
        plans.add_row(row[0], _words(forecast))
    return Group(figures, "", plans)


def _words(forecast: Forecast) -> Text:
    best = forecast.best
    if best is None:
        return Text(forecast.reason, style="dim")
    text = Text(best.words, style="bold")
    text.append(f"\n{format_bytes(best.peak_bytes)} at the peak; {best.reason}", style="not bold dim")
    if forecast.change and forecast.unchanged.verdict is not Verdict.FITS:
        text.append(f"\nthe plan of now: {forecast.unchanged.reason}", style="not bold dim")
    return text


def trial_record(trial: Trial, lesson: Lesson | None = None) -> dict[str, Any]:
    """Return one trial as plain figures; None if the plan did not run.

    `corrected_step_s` is the prediction, corrected by all other measured plans of the lesson.
    """
    candidate = trial.candidate
    return {
        "layout": candidate.words,
        "plan_id": candidate.plan.plan_id if candidate.plan is not None else None,
        "outcome": str(trial.outcome),
        "reason": trial.reason,
        "steps": trial.steps,
        "predicted_step_s": trial.candidate.step_s,
        "corrected_step_s": corrected_s(trial, lesson),
        "measured_step_s": trial.step_s,
        "spread": trial.spread,
        "seconds": list(trial.seconds),
    }


def trials_table(trials: Sequence[Trial], lesson: Lesson | None = None) -> Table:
    """Return a table with a row for each trial, in the order given."""
    table = ranked_table(TRIAL_HEAD[:-1], TRIAL_HEAD[-1])
    for one, row in zip(trials, trial_rows(trials, lesson), strict=True):
        words = Text(row[-1], style="bold" if one.seconds else "")
        note = one.reason if not one.seconds else f"{len(one.seconds)} of {one.steps} steps"
        words.append(f"\n{note}", style="not bold dim")
        table.add_row(*row[:-1], words, style=None if one.seconds else "dim")
    return table
