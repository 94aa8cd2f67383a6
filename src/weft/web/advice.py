"""Advice as JSON and as tables: how candidates stand, what makes them fit, what another cluster would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.describe.cluster import Cluster
from weft.describe.units import format_bytes, format_count, format_seconds
from weft.moves.registry import kept_out
from weft.planning.advice import Advised
from weft.planning.planners import Candidate, Verdict
from weft.planning.problem import Problem
from weft.planning.smallest_change import SmallestChange
from weft.planning.what_if import Forecast
from weft.web.candidates import candidate_record, candidate_row


def advised_record(advised: Advised) -> dict[str, Any]:
    """As `candidate_record`, with `probability_faster`, `standing` and `smallest_change`."""
    change = advised.smallest_change
    return {
        **candidate_record(advised.candidate),
        "probability_faster": advised.standing.probability_faster,
        "standing": advised.standing.text,
        "smallest_change": None
        if change is None
        else {"change": change.words, **candidate_record(change.candidate)},
    }


def kept_out_record(problem: Problem) -> dict[str, str]:
    """The moves that the goal's contract keeps out of a search, each with its own contract."""
    return {move.name: move.contract.word for move in kept_out(problem.contract)}


def advised_row(advised: Advised, cluster: Cluster) -> dict[str, Any]:
    """A row for `weft.web.pictures.plans_table` whose reason says the advice, too."""
    row = candidate_row(advised.candidate, cluster)
    more = [text for text in (advised.standing.text, change_text(advised.smallest_change)) if text]
    return {**row, "reason": "; ".join([row["reason"], *more])}


def change_text(change: SmallestChange | None) -> str:
    """What makes a layout fit, in words; empty where nothing is known to."""
    return "" if change is None else f"fits with {change.words}: a step of {format_seconds(change.step_s)}"


def forecast_record(forecast: Forecast) -> dict[str, Any]:
    """One cluster's forecast as plain figures; None where nothing fits or nothing has a price."""
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


FORECAST_HEAD = ("cluster", "step", "against now", "tokens/s", "cost/M tokens", "the plan of now")


def forecast_rows(forecasts: Sequence[Forecast]) -> list[tuple[str, ...]]:
    """The forecasts as texts under `FORECAST_HEAD`; the cost is left out where nothing has a price."""
    return [
        (
            one.change or "as it is",
            "-" if one.step_s is None else format_seconds(one.step_s),
            "-" if one.against is None else f"{one.against - 1:+.1%}",
            "-" if one.tokens_per_s is None else format_count(one.tokens_per_s),
            "-" if one.cost_per_million_tokens is None else f"{one.cost_per_million_tokens:.3g}",
            "" if not one.change else unchanged_text(one.unchanged),
        )
        for one in forecasts
    ]


def forecasts_table(forecasts: Sequence[Forecast]) -> Group:
    """Figures of one cluster to a row, then the best plan of each."""
    priced = any(one.cost_per_million_tokens is not None for one in forecasts)
    shown = [place for place, name in enumerate(FORECAST_HEAD) if priced or not name.startswith("cost")]
    figures = Table(box=None, pad_edge=False, header_style="dim")
    for place in shown:
        figures.add_column(
            FORECAST_HEAD[place], justify="right" if place else "left", no_wrap=bool(place), overflow="fold"
        )
    plans = Table.grid(padding=(0, 2))
    plans.add_column(overflow="fold", ratio=1)
    plans.add_column(overflow="fold", ratio=3)
    for forecast, row in zip(forecasts, forecast_rows(forecasts), strict=True):
        figures.add_row(*(row[place] for place in shown), style=None if forecast.best else "dim")
        plans.add_row(row[0], _words(forecast))
    return Group(figures, "", plans)


def unchanged_text(candidate: Candidate) -> str:
    """Whether the plan of the cluster as it is can run on another one, and how fast."""
    if candidate.verdict is Verdict.FITS:
        return format_seconds(candidate.step_s)
    return "too big" if candidate.verdict is Verdict.TOO_BIG else "cannot run"


def _words(forecast: Forecast) -> Text:
    best = forecast.best
    if best is None:
        return Text(forecast.reason, style="dim")
    text = Text(best.words, style="bold")
    text.append(f"\n{format_bytes(best.peak_bytes)} at the peak; {best.reason}", style="not bold dim")
    if forecast.change and forecast.unchanged.verdict is not Verdict.FITS:
        text.append(f"\nthe plan of now: {forecast.unchanged.reason}", style="not bold dim")
    return text
