"""Answers of `weft simulate`: a job's predicted step as plain figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.describe.cluster import Cluster, NodeGroup
from weft.errors import InputError, Violation
from weft.planning.planned import PlannedJob
from weft.planning.problem import Problem
from weft.predict.predict import PredictedStep
from weft.program.kinds import KINDS
from weft.program.program import NONE
from weft.timeline.figures import bubble_fraction, busy_by_kind, peak_in_flight


def simulation_record(planned: PlannedJob, predicted: PredictedStep) -> dict[str, Any]:
    """Return the JSON answer; seconds, bytes and counts."""
    simulation = predicted.simulation
    kinds = planned.program.columns.kind[planned.program.columns.rank == 0]
    in_host = {name: held.tolist() for name, held in planned.in_host_memory.items()}
    return {
        "plan_id": planned.plan.plan_id,
        "step_s": simulation.step_s,
        "first_step_s": simulation.first_step_s,
        "step_low_s": predicted.prediction.step_low_s,
        "step_high_s": predicted.prediction.step_high_s,
        "source": predicted.prediction.source,
        "bubble_fraction": bubble_fraction(simulation.timeline),
        "peak_in_flight": peak_in_flight(planned.program),
        "peak_bytes": [int(value) for value in simulation.peak_bytes],
        "peak_instruction": [_named(planned, position) for position in simulation.peak_positions.tolist()],
        **({"host_bytes": in_host} if in_host else {}),
        "gathers": int((kinds == KINDS.code("gather")).sum()),
        "reduces": int((kinds == KINDS.code("reduce")).sum()),
        "instructions": simulation.instructions,
        "breakdown": busy_by_kind(simulation.timeline),
        "step_breakdown": planned.step_breakdown,
        "launching_share": planned.launching_share,
        "simulate_s": simulation.simulate_s,
    }


def _named(planned: PlannedJob, position: int) -> str | None:
    return str(planned.program.instruction(position)) if position != NONE else None


def with_ranks(problem: Problem, ranks: int) -> Problem:
    """Return the problem on a cluster of `ranks` devices of the same one kind.

    Raises:
        InputError: when the cluster is mixed or the count does not fill nodes.
    """
    if len(problem.job.cluster.groups) != 1:
        raise InputError(
            Violation("--ranks", "the cluster has several kinds of nodes; describe it in a file")
        )
    cluster = resized(problem.job.cluster, ranks)
    return replace(problem, job=replace(problem.job, cluster=cluster))


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """Return a cluster of equal nodes with `ranks` devices."""
    group = cluster.groups[0]
    if ranks < 1 or (ranks > group.devices and ranks % group.devices):
        near = max(group.devices, group.devices * round(ranks / group.devices))
        raise InputError(
            Violation("--ranks", f"{ranks} ranks on nodes of {group.devices} devices", str(near))
        )
    count, devices = (1, ranks) if ranks <= group.devices else (ranks // group.devices, group.devices)
    groups: tuple[NodeGroup, ...] = (replace(group, count=count, devices=devices),)
    links = dict(cluster.links) or {(group.name, group.name): group.link}
    return replace(cluster, name=f"{ranks}x{group.device.name}", groups=groups, links=links)
