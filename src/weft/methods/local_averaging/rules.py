"""The rules of local averaging for layouts and plans: more than one replica, and no clipping."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import GRADIENT_NORM, SCALED, Plan
from weft.describe.plan_file import PlanRule, listed
from weft.errors import InputError, Violation
from weft.methods.local_averaging.options import NAME, options_of
from weft.methods.local_averaging.program import CLIPS, NOBODY
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of


def _nobody(job: Job, layout: Layout) -> str | None:
    if layout.sync != NAME or replicas_of(layout) > 1:
        return None
    return f"{NAME}: {NOBODY}, and dp is 1; nearest sync.method: dense"


def _clips(job: Job, layout: Layout) -> str | None:
    if layout.sync != NAME or all(choice.name != GRADIENT_NORM for choice in job.methods):
        return None
    cause = "optimizer.clip_norm and skip_non_finite"
    if job.precision in SCALED:
        cause = f"precision {job.precision}, whose losses are scaled, {cause}"
    if job.optimizer.unit_gradient:
        cause = f"an optimizer that divides gradients by their norm, {cause}"
    return f"{NAME}: {CLIPS}; leave out {cause}"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    try:
        if options_of(plan) is None:
            return
    except InputError as error:
        yield from error.violations
        return
    single = [index for index, stage in enumerate(plan.stages) if len(stage.replicas) == 1]
    if single:
        yield Violation("plan: sync", f"stages {listed(single)}: {NOBODY}", "dense")
    if plan.method(GRADIENT_NORM) is not None:
        yield Violation("plan: sync", CLIPS, "dense")


RULES = (
    Composition(method=NAME, other="one replica", reason=NOBODY, refuse=_nobody),
    Composition(method=NAME, other="gradient norm", reason=CLIPS, refuse=_clips),
    PlanRule(refuse=_problems_of),
)
