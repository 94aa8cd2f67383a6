"""The rules of hierarchical sums: several replicas, whole nodes of them, and no islands."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.hierarchical.options import NAME, options_of
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of

NOBODY = "one replica sends nothing"
ISLANDS = "islands have two levels already"


def problem_of(island: int | None, replicas: int) -> str | None:
    """Return the first reason to refuse; `dense` is the nearest method then."""
    if replicas == 1:
        return NOBODY
    return None if island is None else ISLANDS


def _of_layout(job: Job, layout: Layout) -> str | None:
    if layout.sync != NAME:
        return None
    problem = problem_of(layout.island, replicas_of(layout))
    return None if problem is None else f"{NAME}: {problem}; nearest sync.method: dense"


def _of_plan(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    try:
        options = options_of(plan)
    except InputError as error:
        yield from error.violations
        return
    if options is None:
        return
    counts = {len(stage.replicas) for stage in plan.stages}
    problem = problem_of(plan.island, min(counts))
    if problem is not None:
        yield Violation("plan: sync", f"{NAME}: {problem}", "dense")
    for count in sorted(one for one in counts if one % options.replicas_per_node):
        problem = f"{count} replicas are not whole nodes of {options.replicas_per_node}"
        yield Violation("plan: sync.replicas_per_node", problem, "1")


RULES = (
    Composition(method=NAME, other="one replica, islands", reason=f"{NOBODY}; {ISLANDS}", refuse=_of_layout),
    PlanRule(refuse=_of_plan),
)
