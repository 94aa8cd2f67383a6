"""Losses of a job's steps against ideal ones, and their causes, by simulations with the trace's durations.

The method is that of MegaScale (arXiv 2402.15627, section 5) and of StragglerAnalysis. A group of operations
costs what the ideal step grows by if the group alone takes its own times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from weft.doors.trace.job.operations import (
    BACKWARD_RECEIVE,
    FORWARD_RECEIVE,
    OPERATIONS,
    PASSES,
    Operations,
    is_meeting,
)
from weft.doors.trace.job.program import ImpliedProgram, implied_program
from weft.doors.trace.job.replay import Replay
from weft.program.arrays import Floats, Mask
from weft.timeline.timeline import Timeline

# Below this slowdown the parts are too small to tell apart.
LEAST_SLOWDOWN = 1.03
# The part of the workers that the worst ones are.
WORST_SHARE = 0.03
# Instructions that all simulations of a trace's steps may have together.
MOST_INSTRUCTIONS = 8_000_000

# What-ifs. The first one is the step without delays between operations, the base of the others.
NO_DELAYS = "no delays of hosts"
EQUAL_STAGES = "equal stages"
LAST_STAGE = "a usual last stage"
WORST_WORKERS = "usual worst workers"
TRANSFERS = "usual transfers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A stage of a replica.

    Attributes:
        slowdown: of the step. `passes_s`: mean seconds of its passes in a step.
        against_peers: these over the median of the same stage's in other replicas.
    """

    stage: int
    replica: int
    slowdown: float
    passes_s: float
    against_peers: float


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of a trace's steps; slowdowns are relative to the ideal step.

    Attributes:
        measured_s, simulated_s: by step: as recorded; simulated without the delays of hosts and loaders.
        usual_s: of a step with the median times of each operation by type, rank and place in it.
        ideal_s: of an ideal step.
        slowdown: of the mean simulated step.
        by_replica, by_stage, by_operation: slowdown if all else is ideal, by group.
        workers: by stage and replica; the step they slow most first.
        what_if_s: mean seconds of the compared steps after one change, by the change.
        variation: median relative deviation of a rank's passes of one type within a step.
        times_s: mean seconds of an operation by type, by stage, shape (types, stages); NaN for none.
        compared: the steps of the groups' simulations.
    """

    implied: ImpliedProgram
    measured_s: Floats
    simulated_s: Floats
    usual_s: float
    ideal_s: float
    slowdown: float
    by_replica: Mapping[int, float]
    by_stage: Mapping[int, float]
    by_operation: Mapping[str, float]
    workers: tuple[Worker, ...]
    what_if_s: Mapping[str, float]
    variation: float
    times_s: Floats
    compared: tuple[int, ...]
    measured: Timeline
    ideal: Timeline

    @property
    def operations(self) -> Operations:
        return self.implied.operations

    @property
    def delay_share(self) -> float:
        """The part of the mean measured step that is delays of hosts, between operations."""
        return 1.0 - float(self.simulated_s.mean() / self.measured_s.mean())

    @property
    def explained(self) -> Mapping[str, float]:
        """The part of the loss that each change takes away; two are M_S and M_W of StragglerAnalysis."""
        now_s = self.what_if_s[NO_DELAYS]
        loss_s = now_s - self.ideal_s
        changes = {name: now_s - seconds for name, seconds in self.what_if_s.items() if name != NO_DELAYS}
        return {name: saved_s / loss_s for name, saved_s in changes.items()} if loss_s > 0.0 else {}

    def record(self) -> dict[str, Any]:
        """Return the JSON answer."""
        found, program = self.operations, self.implied.program
        return {
            "trace": "job",
            "stages": found.stages,
            "replicas": found.replicas,
            "chunks": found.chunks,
            "ranks": program.ranks,
            "schedule": program.schedule or None,
            "instructions": len(program),
            "steps": {
                str(step): {"measured_s": measured, "simulated_s": simulated}
                for step, measured, simulated in zip(
                    found.steps, self.measured_s.tolist(), self.simulated_s.tolist(), strict=True
                )
            },
            "ideal_s": self.ideal_s,
            "slowdown": self.slowdown,
            "delay_share": self.delay_share,
            "by_stage": {str(one): value for one, value in self.by_stage.items()},
            "by_replica": {str(one): value for one, value in self.by_replica.items()},
            "by_operation": dict(self.by_operation),
            "workers": [
                {"stage": one.stage, "replica": one.replica, "slowdown": one.slowdown} for one in self.workers
            ],
            "what_if_s": dict(self.what_if_s),
            "explained": dict(self.explained),
            "compared_steps": list(self.compared),
            "left_out": list(found.left_out),
        }


def losses_of(operations: Operations) -> Losses:
    """Return what the steps of a trace lose.

    Raises:
        InputError: when the messages of a rank do not match its passes.
    """
    implied = implied_program(operations)
    replay = Replay(implied)
    simulated = np.array([replay.step_s(own) for own in replay.own_s])
    ideal_s = replay.step_s(replay.ideal_s)
    types, first = implied.types, operations.take(implied.operation)
    groups: dict[tuple[str, Any], Mask] = {}
    groups |= {("replica", one): first.replica == one for one in range(operations.replicas)}
    groups |= {("stage", one): first.stage == one for one in range(operations.stages)}
    # The time of a message is its send's.
    sent = np.setdiff1d(types, (FORWARD_RECEIVE, BACKWARD_RECEIVE))
    groups |= {("operation", one): types == one for one in sent.tolist()}
    compared = _compared(len(groups) + 4, implied)
    kept = {key: replay.mean_s(mask, compared) / ideal_s for key, mask in groups.items()}
    by_replica, by_stage = (
        {which: value for (what, which), value in kept.items() if what == name}
        for name in ("replica", "stage")
    )
    workers = _workers(replay, by_replica, by_stage)
    return Losses(
        implied=implied,
        measured_s=operations.step_s,
        simulated_s=simulated,
        usual_s=replay.step_s(np.median(replay.own_s, axis=0)),
        ideal_s=ideal_s,
        slowdown=float(simulated.mean()) / ideal_s,
        by_replica=by_replica,
        by_stage=by_stage,
        by_operation={
            OPERATIONS[which].name: value for (what, which), value in kept.items() if what == "operation"
        },
        workers=workers,
        what_if_s=_changed_s(replay, simulated, workers, compared),
        variation=replay.variation,
        times_s=_times(operations),
        compared=tuple(operations.steps[index] for index in compared),
        measured=replay.measured(int(np.argsort(operations.step_s)[len(simulated) // 2])),
        ideal=replay.timeline(replay.ideal_s),
    )


def _compared(groups: int, implied: ImpliedProgram) -> list[int]:
    """Return the steps that groups are compared in: all, or some at equal distances in large traces."""
    steps = len(implied.operations.steps)
    most = max(1, MOST_INSTRUCTIONS // (groups * len(implied.program)))
    found: list[int] = np.unique(np.linspace(0, steps - 1, min(steps, most)).round().astype(int)).tolist()
    return found


def _workers(
    replay: Replay, by_replica: Mapping[int, float], by_stage: Mapping[int, float]
) -> tuple[Worker, ...]:
    """Return all stages of replicas; one slows the step at most as its stage and its replica do."""
    stage, replica = replay.places
    passes = np.isin(replay.implied.types, PASSES)
    mean_s = {
        (s, r): float(replay.own_s[:, passes & (stage == s) & (replica == r)].sum(axis=1).mean())
        for s in by_stage
        for r in by_replica
    }
    found = []
    for (s, r), own_s in mean_s.items():
        peers = [other for (there, of), other in mean_s.items() if there == s and of != r]
        usual = float(np.median(peers)) if peers else own_s
        found.append(
            Worker(
                stage=s,
                replica=r,
                slowdown=min(by_stage[s], by_replica[r]),
                passes_s=own_s,
                against_peers=own_s / usual if usual else 1.0,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.slowdown, one.stage, one.replica)))


def _changed_s(
    replay: Replay, simulated: Floats, workers: tuple[Worker, ...], compared: list[int]
) -> dict[str, float]:
    """Return the mean step after each change; in `EQUAL_STAGES` passes take as long in all stages."""
    stage, replica = replay.places
    worst = np.zeros(len(stage), dtype=np.bool_)
    for one in workers[: ceil(WORST_SHARE * len(workers))]:
        worst |= (stage == one.stage) & (replica == one.replica)
    usual = {
        LAST_STAGE: stage == stage.max(),
        WORST_WORKERS: worst,
        TRANSFERS: is_meeting(replay.implied.types),
    }
    return {
        NO_DELAYS: float(simulated[compared].mean()),
        EQUAL_STAGES: float(np.mean([replay.step_s(replay.balanced_s(step)) for step in compared])),
        **{name: replay.mean_s(~mask, compared) for name, mask in usual.items()},
    }


def _times(operations: Operations) -> Floats:
    """Return the mean seconds of each type in each stage; NaN where a stage has none."""
    seconds, counts = (np.zeros((len(OPERATIONS), operations.stages)) for _ in range(2))
    place = operations.type, operations.stage
    np.add.at(seconds, place, operations.end_s - operations.start_s)
    np.add.at(counts, place, 1.0)
    return np.divide(seconds, counts, out=np.full_like(seconds, np.nan), where=counts > 0)
