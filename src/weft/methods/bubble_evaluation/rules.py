"""The rules of evaluation in bubbles: whole weights, and a run that asks for held-out losses."""

from __future__ import annotations

from collections.abc import Iterator

from weft.bundles import parts
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.plan import GRADIENT_NORM, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.bubble_evaluation.sizes import NAME, most_steps_of
from weft.methods.bubble_filling.options import NAME as BUBBLES
from weft.methods.bubble_filling.options import options_of
from weft.methods.bubble_filling.works import BubbleWork
from weft.moves.composition import Composition
from weft.planning.job_rules import JobRule
from weft.planning.planned import PlannedJob

_ALLOWED = (BUBBLES, GRADIENT_NORM)


def _problems(*, divided: int, sharding: str, sync: str, others: list[str]) -> Iterator[Violation]:
    """Yield why no rank has whole weights to copy, or other methods change what it would evaluate."""
    if divided > 1:
        yield Violation("tp", f"{divided} ranks divide a replica, and its copy of weights", "1")
    if sharding != "zero-0":
        yield Violation("sharding", f"{sharding}: a copy of weights needs whole ones", "zero-0")
    if sync != DENSE:
        yield Violation("sync", f"{sync}: replicas may have unlike weights", DENSE)
    if others:
        yield Violation("methods", f"{', '.join(others)}: may change forward passes", "leave it out")


def _others(names: list[str]) -> list[str]:
    works = {one.method for one in parts(BubbleWork)}
    return [name for name in names if name not in works and name not in _ALLOWED]


def _of_layout(job: Job, layout: Layout) -> str | None:
    methods = layout.methods_beside(job.methods)
    bubbles = next((one for one in methods if one.name == BUBBLES), None)
    if bubbles is None or NAME not in str(bubbles.options.get("work", "")).split(","):
        return None
    found = _problems(
        divided=layout.tp * layout.cp * layout.ep,
        sharding=layout.sharding,
        sync=layout.sync,
        others=_others([one.name for one in methods]),
    )
    first = next(found, None)
    if first is None:
        return None
    return f"{NAME}: {first.where}: {first.problem}; nearest {first.where}: {first.nearest}"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield what a plan that was edited by hand must not contain."""
    try:
        asked = options_of(plan)
    except InputError:
        return  # The rule of bubbles tells it.
    if asked is None or NAME not in asked.work.split(","):
        return
    for one in _problems(
        divided=max(len(replica.ranks) for stage in plan.stages for replica in stage.replicas),
        sharding=plan.sharding,
        sync=plan.sync.name,
        others=_others([one.name for one in plan.methods]),
    ):
        yield Violation(f"plan: {one.where}", f"{NAME}: {one.problem}", one.nearest)


def _no_evaluations(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation for a run that asks for no held-out losses, for too many, or compiles its stages."""
    asked, train = options_of(planned.plan), planned.run.train
    if asked is None or NAME not in asked.work.split(","):
        return
    steps, every = most_steps_of(planned.plan, asked), train.evaluate_every
    if every is None:
        problem = "is left out, so no held-out losses fill bubbles"
        yield Violation("train.evaluate_every", problem, str(max(steps, min(100, train.steps))))
    elif every < steps:
        problem = f"{every}; an evaluation in bubbles takes {steps} steps"
        yield Violation("train.evaluate_every", problem, str(steps))
    if train.compile:
        problem = f"compiled stages are not copied, as {NAME} in bubbles needs"
        yield Violation("train.compile", problem, "false")


RULES = (
    Composition(
        method="evaluation in bubbles",
        other="divided layers, sharding, other synchronisation and other methods",
        reason="a copy of weights stands for all replicas",
        refuse=_of_layout,
    ),
    PlanRule(refuse=_problems_of),
    JobRule(refuse=_no_evaluations),
)
