"""The rules of an auxiliary head for layouts and plans."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.auxiliary_head.layers import head_places
from weft.methods.auxiliary_head.options import NAME, options_of
from weft.methods.auxiliary_head.program import DIVIDED
from weft.moves.composition import Composition


def _divided(job: Job, layout: Layout) -> str | None:
    chosen = any(choice.name == NAME for choice in job.methods)
    if not chosen or layout.tp == layout.cp == 1:
        return None
    return f"{NAME}: {DIVIDED}; nearest tp: 1, cp: 1"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    try:
        options = options_of(plan)
    except InputError as error:
        yield from error.violations
        return
    has = ", ".join(map(str, head_places(graph)))
    asks = "" if options is None else str(options.after_block)
    if has != asks:
        problem = f"the plan's head is behind block {asks or 'none'}, the job's behind block {has or 'none'}"
        yield Violation("plan: methods", problem)
    elif options is not None and any(plan.grid(index).ranks > 1 for index in range(len(plan.stages))):
        yield Violation("plan: methods", f"{NAME}: {DIVIDED}", "tp 1, cp 1")


RULES = (
    Composition(
        method="auxiliary head",
        other="tensor and context parallelism",
        reason="the head and its loss are whole on one rank",
        refuse=_divided,
    ),
    PlanRule(refuse=_problems_of),
)
