"""Candidates of a planner as rows for tables and as JSON."""

from __future__ import annotations

from typing import Any

from weft.describe.units import format_seconds
from weft.planning.planners import Candidate, Ranking


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """One candidate as plain figures; seconds and bytes, None where the layout was not simulated.

    `estimate_s` is what the planner's own model says, None where that is the simulator.
    """
    prediction = candidate.plan.prediction if candidate.plan is not None else None
    layout = candidate.layout
    return {
        "layout": str(layout),
        "pp": layout.pipeline_parallel,
        "dp": layout.data_parallel,
        "tp": layout.tensor_parallel,
        "cp": layout.context_parallel,
        "loops": layout.loops,
        "micro_batch_size": layout.micro_batch_size,
        "schedule": layout.schedule,
        "sharding": layout.sharding,
        "island": layout.island,
        "recompute": layout.recompute,
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


def candidate_row(candidate: Candidate, memory_bytes: int) -> dict[str, Any]:
    """A row for `weft.web.pictures.plans_table`; `memory_bytes` are those of the smallest device."""
    record = candidate_record(candidate)
    return {
        "name": record["layout"],
        "step_s": record["step_s"],
        "low": record["step_low_s"],
        "high": record["step_high_s"],
        "peak_bytes": record["peak_bytes"],
        "memory_bytes": memory_bytes,
        "fits": record["verdict"] == "fits",
        "reason": _reason(candidate),
    }


def least_memory_bytes(ranking: Ranking) -> int:
    """Memory of the smallest device that the candidates run on."""
    return min(group.device.memory_bytes for group in ranking.problem.job.cluster.groups)


def _reason(candidate: Candidate) -> str:
    """Why it stands here, and what the planner's own model says of a step that was simulated."""
    if candidate.estimate_s is None or candidate.plan is None:
        return candidate.reason
    return f"{candidate.reason}; estimated {format_seconds(candidate.estimate_s)}"
