"""The rules that refuse packed samples where ranks share out their tokens, or compiled layers run them."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import PACKING, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import Violation
from weft.moves.composition import Composition

REASON = "context ranks attend to the keys of all tokens, and documents leave most of them out"


def _context(job: Job, layout: Layout) -> str | None:
    packed = any(choice.name == PACKING for choice in job.methods)
    return f"{PACKING}: {REASON}; nearest cp: 1" if packed and layout.cp > 1 else None


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    if plan.cp > 1 and plan.method(PACKING) is not None:
        yield Violation("plan: mesh.cp", f"{PACKING}: {REASON}", "1")


RULES = (
    Composition(method="packing of samples", other="context parallelism", reason=REASON, refuse=_context),
    PlanRule(refuse=_problems_of),
)
