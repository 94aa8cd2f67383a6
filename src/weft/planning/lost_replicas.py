"""Runs that go on without a lost replica: the plan of those that are left, and reasons against it."""

from __future__ import annotations

from collections.abc import Collection

from weft.describe.plan import Plan
from weft.describe.run_tables.training import GO_ON
from weft.describe.synchronisation import indispensable
from weft.describe.units import counted, format_bytes
from weft.errors import Violation
from weft.planning.planned import changed_to
from weft.planning.planned_job import TO_GO_BACK, PlannedJob

# The event of replicas whose processes were killed, and that of the others with their first step after it.
DIED, WENT_ON = "replicas died", "went on"
# The fewest replicas that can meet.
LEAST = 2


def goes_on(job: PlannedJob) -> bool:
    """Return True if the run is to go on when a process is killed."""
    return job.run.run.on_death == GO_ON


def refused_deaths(job: PlannedJob) -> list[Violation]:
    """Return the first reason why a run that is to go on without a replica cannot; empty if it can."""
    plan, problem = job.plan, None
    if not goes_on(job):
        return []
    if (why := indispensable(plan.sync)) is not None:
        problem = f"with sync {plan.sync.name!r}: {why}"
    elif (replicas := ranks_of_replicas(plan)) is None:
        problem = "some ranks have stages of several replicas, and would be lost with each of them"
    elif len(replicas) <= LEAST:
        problem = f"{counted(len(replicas), 'replica')}; without one, fewer than {LEAST} are left to meet"
    elif job.run.plan.then is not None:
        problem = "plan.then changes the plan, too"
    elif job.run.run.transport == "device":
        problem = "transport 'device' does not open new groups after a death; use 'host'"
    else:
        problem = _no_room(job)
    return [] if problem is None else [Violation("run.on_death", f"{GO_ON!r} {problem}", "stop")]


def _no_room(job: PlannedJob) -> str | None:
    """Return why copies of whole states do not fit beside a rank that computes in its host's memory."""
    cluster, peaks = job.problem.job.cluster, job.prediction.peak_bytes
    for rank, copies in enumerate(job.in_host_memory[TO_GO_BACK].tolist()):
        left = job.usable_bytes[rank] - peaks[rank]
        if cluster.device_of(rank).synchronous and copies > left:
            needed, there = format_bytes(copies), format_bytes(max(0, left))
            return f"keeps {needed} of whole states on rank {rank}, which has {there} left"
    return None


def ranks_of_replicas(plan: Plan) -> list[tuple[int, ...]] | None:
    """Return the sorted ranks of each replica over all stages; None if replicas share ranks."""
    if len(set(plan.replicas)) > 1:
        return None
    copies = zip(*(stage.replicas for stage in plan.stages), strict=True)
    found = [tuple(sorted({rank for copy in one for rank in copy.ranks})) for one in copies]
    return found if sum(map(len, found)) == plan.ranks else None


def replicas_of(plan: Plan, ranks: Collection[int]) -> list[int]:
    """Return the replicas that have some of these ranks."""
    return [number for number, own in enumerate(ranks_of_replicas(plan) or ()) if set(own) & set(ranks)]


def job_among(job: PlannedJob, ranks: Collection[int]) -> PlannedJob:
    """Return the job with a plan of the replicas of some ranks; of all ranks: the job itself.

    Raises:
        InputError: with every fault of that plan.
    """
    if len(ranks) == job.plan.ranks:
        return job
    return changed_to(job, plan_among(job.plan, replicas_of(job.plan, ranks)), None)


def plan_among(plan: Plan, replicas: Collection[int]) -> Plan:
    """Return a plan of some replicas, whose ranks are numbered anew, in the old order.

    Each replica keeps its micro-batches.
    """
    chosen = sorted(replicas)
    own = ranks_of_replicas(plan)
    assert own is not None, "others are refused"
    places = {rank: place for place, rank in enumerate(sorted(rank for one in chosen for rank in own[one]))}
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    copy.model_copy(update={"ranks": tuple(places[rank] for rank in copy.ranks)})
                    for copy in (stage.replicas[one] for one in chosen)
                )
            }
        )
        for stage in plan.stages
    )
    batch = plan.micro_batch_size * sum(copy.micro_batches for copy in stages[0].replicas)
    mesh = {**plan.mesh, "dp": len(chosen)}
    return plan.model_copy(update={"stages": stages, "global_batch": batch, "mesh": mesh})
