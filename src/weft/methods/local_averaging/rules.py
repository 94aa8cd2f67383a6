"""The rules of local steps for layouts and plans: more than one replica, and no scaled losses."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import SCALED, Choice, Plan
from weft.describe.plan_file import PlanRule, listed
from weft.describe.synchronisation import DECIDED, keeps_gradients_local, local_steps
from weft.errors import InputError, Violation
from weft.methods.local_averaging.options import NAME
from weft.methods.local_averaging.program import NOBODY
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob

SCALES = "replicas that step by themselves have no common factor of their losses"


def _nobody(job: Job, layout: Layout) -> str | None:
    if replicas_of(layout) > 1 or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{layout.sync}: {NOBODY}, and dp is 1; nearest sync.method: dense"


def _scales(job: Job, layout: Layout) -> str | None:
    if job.precision not in SCALED or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{layout.sync}: {SCALES}; nearest train.precision: bf16"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    try:
        steps = local_steps(plan.sync, "plan: sync.options")
        if steps is None:
            return
        if steps.replica_steps == DECIDED:
            problem = f"replica_steps: {DECIDED}: the choice of a plan decides it, and a plan states it"
            all_steps = " ".join(map(str, steps.steps_of(len(plan.stages[0].replicas))))
            yield Violation("plan: sync.options", problem, all_steps)
    except InputError as error:
        yield from error.violations
        return
    single = [index for index, stage in enumerate(plan.stages) if len(stage.replicas) == 1]
    if single:
        yield Violation("plan: sync", f"stages {listed(single)}: {NOBODY}", "dense")
    if plan.precision in SCALED:
        yield Violation("plan: sync", f"{plan.precision}: {SCALES}", "dense")


def _never_meet(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation for a run that ends before the first averaging."""
    local, steps = local_steps(planned.plan.sync), planned.run.train.steps
    if local is not None and local.every > steps:
        problem = f"{steps}; replicas average every {local.every} steps, so they never would"
        yield Violation("train.steps", problem, str(local.every))


RULES = (
    Composition(method=NAME, other="one replica", reason=NOBODY, refuse=_nobody),
    Composition(method=NAME, other="fp16", reason=SCALES, refuse=_scales),
    PlanRule(refuse=_problems_of),
    JobRule(refuse=_never_meet),
)
