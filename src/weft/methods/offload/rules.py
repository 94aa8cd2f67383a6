"""The rules of offload for layouts and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import Violation
from weft.methods.offload.options import ACTIVATIONS, AGAIN, NAME, NO_STATES, STATES, offloaded, problems_of
from weft.methods.offload.verify import leave
from weft.moves.composition import Composition
from weft.moves.layout import pipeline_of
from weft.program.program import Columns
from weft.program.schedules import all_schedules, get_schedule
from weft.program.schedules.base import Options, Pipeline, paths_of

SOON = "backward passes come so soon that no device would hold fewer micro-batches"
AGREED = "replicas that step by themselves average their states for checkpoints, on their devices"


def _impossible(job: Job, layout: Layout) -> str | None:
    for one in problems_of(layout.methods_beside(job.methods), layout.recomputes, job.optimizer):
        return f"{one.where}: {one.problem}; nearest: {one.nearest}"
    return None


def _stay(job: Job, layout: Layout) -> str | None:
    stages = offloaded(layout.methods_beside(job.methods), layout.stages).activations
    if not stages or not _all_stay(layout.schedule, layout.options, pipeline_of(job, layout), stages):
        return None
    return f"{NAME}.{ACTIVATIONS}: {SOON}; nearest {ACTIVATIONS}: false"


def _all_stay(name: str, options: Options, pipeline: Pipeline, stages: tuple[int, ...]) -> bool:
    """Return True if no micro-batch's activations leave a device in the schedule's order."""
    schedule = get_schedule(name)
    if schedule.refuse(pipeline, options) is not None:
        return False
    for device in range(pipeline.devices):
        order = schedule.order(pipeline, device, options)
        size = len(order.kind)
        rows = Columns.of(size, kind=order.kind, stage=order.stage, micro_batch=order.micro_batch)
        if leave(rows, np.arange(size), stages):
            return False
    return True


def _averaged(job: Job, layout: Layout) -> str | None:
    methods = layout.methods_beside(job.methods)
    if not offloaded(methods, layout.stages).states or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{NAME}.{STATES}: {AGREED}; nearest sync.method: dense"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    recomputes = [stage.recompute for stage in plan.stages]
    for one in problems_of(plan.methods, recomputes, plan.optimizer):
        yield replace(one, where=f"plan: methods: {one.where}")
    of = offloaded(plan.methods, len(plan.stages))
    # Another rule refuses a schedule that nobody knows.
    name, share = plan.schedule.name, plan.stages[0].replicas[0].micro_batches
    if of.activations and name in all_schedules():
        micro_batches = share * paths_of(get_schedule(name))
        pipeline = Pipeline(plan.pp, len(plan.stages), micro_batches)
        if _all_stay(name, plan.schedule.options, pipeline, of.activations):
            yield Violation(f"plan: methods: {NAME}.{ACTIVATIONS}", SOON, "false")
    if keeps_gradients_local(plan.sync) and of.states:
        yield Violation("plan: sync", f"{NAME}.{STATES}: {AGREED}", "dense")


RULES = (
    Composition(
        method=NAME,
        other="recomputation, and optimizers without states",
        reason=f"{AGAIN}; {NO_STATES}",
        refuse=_impossible,
    ),
    Composition(
        method=NAME,
        other="orders that keep few micro-batches",
        reason=SOON,
        refuse=_stay,
    ),
    Composition(method=NAME, other="replicas that step by themselves", reason=AGREED, refuse=_averaged),
    PlanRule(refuse=_problems_of),
)
