"""Candidates of a planner as records and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.describe.cluster import Cluster
from weft.describe.units import format_bytes, format_seconds
from weft.planning.planners import Candidate


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """One candidate as plain figures; seconds and bytes, None where the layout was not simulated.

    `estimate_s` is what the planner's own model says, None where that is the simulator.
    """
    prediction = candidate.prediction
    return {
        "layout": candidate.words,
        **(candidate.layout.record() if candidate.layout is not None else {}),
        "verdict": str(candidate.verdict),
        "reason": candidate.reason,
        "bound_s": candidate.bound_s,
        "estimate_s": candidate.estimate_s,
        "step_s": prediction.step_s if prediction else None,
        "step_low_s": prediction.step_low_s if prediction else None,
        "step_high_s": prediction.step_high_s if prediction else None,
        "peak_bytes": candidate.peak_bytes or None,
        "plan_id": candidate.plan.plan_id if candidate.plan else None,
    }


def candidate_row(candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """A row for `plans_table`; memory is that of the fullest device the candidate uses."""
    record = candidate_record(candidate)
    peak_bytes, memory_bytes = _fullest(candidate, cluster)
    return {
        "name": record["layout"],
        "step_s": record["step_s"],
        "low": record["step_low_s"],
        "high": record["step_high_s"],
        "peak_bytes": peak_bytes or None,
        "memory_bytes": memory_bytes,
        "fits": record["verdict"] == "fits",
        "reason": _reason(candidate),
    }


def _fullest(candidate: Candidate, cluster: Cluster) -> tuple[int, int]:
    """Peak and memory of the device that is filled most; without a plan the smallest one is taken for it."""
    prediction = candidate.prediction
    if prediction is None:
        return candidate.peak_bytes, min(group.device.memory_bytes for group in cluster.groups)
    pairs = ((peak, cluster.device_of(rank).memory_bytes) for rank, peak in enumerate(prediction.peak_bytes))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _reason(candidate: Candidate) -> str:
    """Why it stands here, and what the planner's own model says of a step that was simulated."""
    if candidate.estimate_s is None or candidate.plan is None:
        return candidate.reason
    return f"{candidate.reason}; estimated {format_seconds(candidate.estimate_s)}"


def plans_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Ranked plans, best first.

    Each row has `name`, `step_s`, `low`, `high`, `peak_bytes` (None where the plan was not simulated),
    `memory_bytes`, `fits` and `reason`.
    """
    # Narrow figures first and the words last, so that 80 columns cut nothing off.
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "step", "90 % interval", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan, and why it stands here", overflow="fold")
    for place, row in enumerate(rows, start=1):
        simulated = row["step_s"] is not None
        interval = f"{format_seconds(row['low'])} - {format_seconds(row['high'])}" if simulated else "-"
        words = Text(row["name"], style="bold" if row["fits"] else "")
        if row["reason"]:
            words.append(f"\n{row['reason']}", style="not bold dim")
        table.add_row(
            str(place),
            format_seconds(row["step_s"]) if simulated else "-",
            interval,
            _peak_text(row["peak_bytes"], row["memory_bytes"]),
            words,
            style=None if row["fits"] else "dim",
        )
    return table


def _peak_text(peak_bytes: int | None, memory_bytes: int) -> str:
    return "-" if peak_bytes is None else f"{format_bytes(peak_bytes)} ({peak_bytes / memory_bytes:.0%})"
