"""Runs that go on without a lost replica: the plan of those that are left, and reasons against it."""

from __future__ import annotations

from collections.abc import Collection

from weft.describe.plan import Plan
from weft.describe.run_tables.training import GO_ON
from weft.describe.synchronisation import indispensable
from weft.errors import Violation
from weft.planning.planned import PlannedJob, changed_to

# The event of replicas whose processes were killed, and that of the others with their first step after it.
DIED, WENT_ON = "replicas died", "went on"
# The fewest replicas that can meet.
LEAST = 2


def goes_on(job: PlannedJob) -> bool:
    """Return True if the run is to go on when a process is killed."""
    return job.run.run.on_death == GO_ON


def refused_deaths(job: PlannedJob) -> list[Violation]:
    """Return the first reason why a run that is to go on without a replica cannot; empty if it can."""
    plan = job.plan
    if not goes_on(job):
        return []
    widest = max(len(copy.ranks) for stage in plan.stages for copy in stage.replicas)
    problem = None
    if (why := indispensable(plan.sync)) is not None:
        problem = f"with sync {plan.sync.name!r}: {why}"
    elif len(plan.stages) * widest > 1:
        problem = "a replica has several ranks, and only one of a single rank can be lost"
    elif len(plan.stages[0].replicas) <= LEAST:
        problem = f"{len(plan.stages[0].replicas)} replicas; without one, fewer than {LEAST} are left to meet"
    elif job.run.plan.then is not None:
        problem = "plan.then changes the plan, too"
    elif job.run.run.transport == "device":
        problem = "transport 'device' does not open new groups after a death; use 'host'"
    return [] if problem is None else [Violation("run.on_death", f"{GO_ON!r} {problem}", "stop")]


def job_among(job: PlannedJob, ranks: Collection[int]) -> PlannedJob:
    """Return the job with a plan of the replicas of some ranks; of all ranks: the job itself.

    Raises:
        InputError: with every fault of that plan.
    """
    return job if len(ranks) == job.plan.ranks else changed_to(job, plan_among(job.plan, ranks), None)


def replica_of_rank(plan: Plan, rank: int) -> int:
    """Return the replica of a rank in such a plan."""
    return next(number for number, copy in enumerate(plan.stages[0].replicas) if rank in copy.ranks)


def plan_among(plan: Plan, ranks: Collection[int]) -> Plan:
    """Return a plan of the replicas of some ranks, which are numbered anew, in the old order.

    The plan has one stage, and one rank for each replica. Each replica keeps its micro-batches.
    """
    (stage,) = plan.stages
    places = {rank: place for place, rank in enumerate(sorted(ranks))}
    kept = tuple(
        copy.model_copy(update={"ranks": (places[rank],)})
        for copy in stage.replicas
        for rank in copy.ranks
        if rank in places
    )
    batch = plan.micro_batch_size * sum(one.micro_batches for one in kept)
    return plan.model_copy(
        update={
            "stages": (stage.model_copy(update={"replicas": kept}),),
            "global_batch": batch,
            "mesh": {**plan.mesh, "dp": len(kept)},
        }
    )
