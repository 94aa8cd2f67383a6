"""The rules of offload for layouts and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import Violation
from weft.methods.offload.options import AGAIN, NAME, NO_STATES, STATES, offloaded, problems_of
from weft.moves.composition import Composition

AGREED = "replicas that step by themselves average their states for checkpoints, on their devices"


def _impossible(job: Job, layout: Layout) -> str | None:
    for one in problems_of(layout.methods_beside(job.methods), layout.recomputes, job.optimizer):
        return f"{one.where}: {one.problem}; nearest: {one.nearest}"
    return None


def _averaged(job: Job, layout: Layout) -> str | None:
    methods = layout.methods_beside(job.methods)
    if not offloaded(methods, layout.stages).states or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{NAME}.{STATES}: {AGREED}; nearest sync.method: dense"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    recomputes = [stage.recompute for stage in plan.stages]
    for one in problems_of(plan.methods, recomputes, plan.optimizer):
        yield replace(one, where=f"plan: methods: {one.where}")
    if keeps_gradients_local(plan.sync) and offloaded(plan.methods, len(plan.stages)).states:
        yield Violation("plan: sync", f"{NAME}.{STATES}: {AGREED}", "dense")


RULES = (
    Composition(
        method=NAME,
        other="recomputation, and optimizers without states",
        reason=f"{AGAIN}; {NO_STATES}",
        refuse=_impossible,
    ),
    Composition(method=NAME, other="replicas that step by themselves", reason=AGREED, refuse=_averaged),
    PlanRule(refuse=_problems_of),
)
