"""Answers of several planners as records and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.cli.tables.candidates import candidate_record
from weft.cli.tables.layout import plain_table
from weft.describe.units import format_bytes, format_seconds
from weft.planning.comparison import Answer


def answer_record(answer: Answer) -> dict[str, Any]:
    """Return one planner's answer; `best` is its `candidate_record`, or None without a candidate."""
    return {
        "planner": answer.planner,
        "search_s": answer.search_s,
        "considered": answer.considered,
        "fits": answer.fits,
        "passed_over": answer.passed_over,
        "behind": answer.behind,
        "reason": answer.reason,
        "best": None if answer.candidate is None else candidate_record(answer.candidate),
    }


def answers_table(answers: Sequence[Answer]) -> Group:
    """Return a table of figures, one row per planner in the given order, and the best plan of each."""
    # Plans are long: next to the figures they would not fit into 80 columns.
    figures = plain_table()
    figures.add_column("planner", no_wrap=True)
    for name in ("step", "behind", "90 % interval", "estimate", "peak", "search"):
        figures.add_column(name, justify="right", no_wrap=True)
    plans = Table.grid(padding=(0, 2))
    plans.add_column(no_wrap=True)
    plans.add_column(overflow="fold")
    for answer in answers:
        style = None if answer.fits else "dim"
        figures.add_row(answer.planner, *_figures(answer), style=style)
        name = "none" if answer.candidate is None else answer.candidate.words
        words = Text(name, style="bold" if answer.fits else "")
        passed_over = f"; {answer.passed_over} before it do not fit" if answer.passed_over else ""
        words.append(f"\n{answer.reason}{passed_over}", style="not bold dim")
        plans.add_row(answer.planner, words, style=style)
    return Group(figures, "", plans)


def _figures(answer: Answer) -> tuple[str, ...]:
    prediction = answer.prediction
    behind = "does not fit" if answer.step_s is not None else "-"
    if answer.behind is not None:
        behind = f"+{answer.behind:.1%}" if answer.behind else "best"
    candidate = answer.candidate
    peak_bytes = 0 if candidate is None else candidate.peak_bytes
    return (
        _seconds(answer.step_s),
        behind,
        "-"
        if prediction is None
        else f"{format_seconds(prediction.step_low_s)} - {format_seconds(prediction.step_high_s)}",
        _seconds(None if candidate is None else candidate.estimate_s),
        format_bytes(peak_bytes) if peak_bytes else "-",
        format_seconds(answer.search_s),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
