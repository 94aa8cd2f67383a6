"""The rules that refuse windows on context ranks, which attend to all tokens."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import LayerChoice, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import Violation
from weft.methods.attention_window.options import NAME
from weft.moves.composition import Composition

REASON = "context ranks attend to the keys of all tokens, and windows leave most of them out"


def _context(job: Job, layout: Layout) -> str | None:
    if layout.cp == 1 or not _has_windows(job.layer_choices):
        return None
    return f"{NAME}: {REASON}; nearest cp: 1"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    if plan.cp > 1 and _has_windows(plan.layer_choices):
        yield Violation("plan: mesh.cp", REASON, "1")


def _has_windows(choices: tuple[LayerChoice, ...]) -> bool:
    return any(choice.name == NAME for choice in choices)


RULES = (
    Composition(method=NAME, other="context parallelism", reason=REASON, refuse=_context),
    PlanRule(refuse=_problems_of),
)
