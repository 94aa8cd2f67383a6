"""Candidates of a planner as rows for tables and as JSON."""

from __future__ import annotations

from typing import Any

from weft.describe.cluster import Cluster
from weft.describe.units import format_seconds
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
    """A row for `weft.web.pictures.plans_table`; memory is that of the fullest device the candidate uses."""
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
