"""Two predicted plans side by side: decisions, step, memory and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from weft.cli.output import folded_table
from weft.describe.units import format_bytes, format_count, format_seconds
from weft.planning.planned_job import PlannedJob


def predicted_record(planned: PlannedJob) -> dict[str, Any]:
    """Return a plan's decisions in words, and its predicted figures in seconds and bytes."""
    plan, prediction = planned.plan, planned.predicted.prediction
    fullest = planned.fullest_rank
    return {
        "plan_id": plan.plan_id,
        "model": plan.model,
        "cluster": plan.cluster,
        "layout": plan.words,
        **prediction.step_record,
        "tokens_per_s": plan.global_batch * plan.sequence / prediction.step_s,
        "peak_bytes": prediction.peak_bytes[fullest],
        "usable_bytes": planned.usable_bytes[fullest],
        "chance_to_fit": prediction.chance_to_fit(planned.unreserved_bytes),
        "breakdown": dict(planned.step_breakdown),
    }


def side_by_side_record(first: PlannedJob, second: PlannedJob) -> dict[str, Any]:
    """Return both plans' records, and the second step as a share of the first."""
    one, two = predicted_record(first), predicted_record(second)
    return {"plans": [one, two], "step_ratio": two["step_s"] / one["step_s"]}


def side_by_side_table(first: PlannedJob, second: PlannedJob) -> Table:
    """Return one row for each decision and figure of two plans, with the change of its number."""
    sides = one, two = predicted_record(first), predicted_record(second)
    table = folded_table(("", "first", "second", "change"))
    for name in ("plan_id", "model", "cluster", "layout", "source"):
        differs = "" if one[name] == two[name] else "differs"
        table.add_row(name.removesuffix("_id"), one[name], two[name], differs)
    steps = (format_seconds(side["step_s"]) for side in sides)
    table.add_row("time of a step", *steps, _change(sides, "step_s"))
    intervals = (planned.predicted.prediction.interval for planned in (first, second))
    table.add_row("90 % interval", *intervals)
    rates = (format_count(side["tokens_per_s"]) for side in sides)
    table.add_row("tokens/s", *rates, _change(sides, "tokens_per_s"))
    peaks = (
        f"{format_bytes(side['peak_bytes'])} of {format_bytes(side['usable_bytes'])} usable" for side in sides
    )
    table.add_row("peak of the fullest rank", *peaks, _change(sides, "peak_bytes"))
    table.add_row("chance to fit", *(f"{side['chance_to_fit']:.1%}" for side in sides))
    parts = [side["breakdown"] for side in sides]
    for name in dict.fromkeys(name for part in parts for name, seconds in part.items() if seconds):
        seconds = (format_seconds(part.get(name, 0.0)) for part in parts)
        table.add_row(name.replace("_", " "), *seconds, _change(parts, name))
    return table


def _change(sides: Sequence[Mapping[str, Any]], name: str) -> str:
    first, second = (side.get(name, 0.0) for side in sides)
    return f"{second / first - 1.0:+.1%}" if first else ""
