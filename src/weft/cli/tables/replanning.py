"""The plans of a job without some of its devices, as a table and as a record."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from weft.cli.output import ranked_table
from weft.cli.tables.candidates import candidate_record
from weft.describe.units import format_bytes, format_seconds
from weft.planning.replanning import NextPlan, Replanning


def replanning_record(replanning: Replanning) -> dict[str, Any]:
    """Return the plans with moved bytes and break-even steps, the chosen one first, as plain figures."""
    before = replanning.before
    return {
        "assumed": dict(replanning.problem.assumed),
        "assumed_states": replanning.assumed,
        "before": {
            "plan_id": before.plan.plan_id,
            "layout": before.plan.words,
            "cluster": before.plan.cluster,
            "step_s": before.prediction.step_s,
        },
        "cluster": replanning.problem.job.cluster.name,
        "former_ranks": list(replanning.former_ranks),
        "considered": replanning.considered,
        "found_nothing": dict(replanning.refused),
        "plans": [
            {"break_even_step": steps, **_plan_record(one)}
            for one, steps in zip(replanning.front, replanning.break_even_steps, strict=True)
        ],
    }


def _plan_record(one: NextPlan) -> dict[str, Any]:
    moved = one.moved
    return {
        "way": one.way,
        "moved_bytes": moved.total_bytes,
        "received_bytes": list(moved.received_bytes),
        "lost_bytes": moved.lost_bytes,
        "moving_s": moved.seconds,
        **candidate_record(one.candidate),
    }


def replanning_table(replanning: Replanning) -> Table:
    """Return a table of the plans, the one with the least moved bytes first."""
    table = ranked_table(("step", "moved", "in", "break-even"), "plan")
    for one, steps in zip(replanning.front, replanning.break_even_steps, strict=True):
        words = Text(one.candidate.words, style="bold" if steps is None else "")
        words.append(f"\n{one.way}", style="not bold dim")
        table.add_row(
            format_seconds(one.candidate.step_s),
            format_bytes(one.moved.total_bytes),
            format_seconds(one.moved.seconds),
            _break_even(steps),
            words,
        )
    return table


def _break_even(steps: int | None) -> str:
    if steps is None:
        return "-"
    return "at once" if steps == 0 else f"step {steps}"
