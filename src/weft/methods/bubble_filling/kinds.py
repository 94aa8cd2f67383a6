"""The kinds of work beside the passes of a plan, and the obligation of a program to do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.bubble_filling.options import NAME, options_of
from weft.methods.bubble_filling.step_works import step_works_of
from weft.methods.bubble_filling.works import WorkRows, items_of
from weft.program.program import Owed, Program


@dataclass(frozen=True, kw_only=True)
class FillsBubbles(Owed):
    """The obligation of every stage to do all its work once in each of its windows.

    Attributes:
        steps: by stage, the steps of a window; the first one captures.
        items: by stage, what a window does.
    """

    steps: tuple[int, ...]
    items: tuple[tuple[WorkRows, ...], ...]

    @property
    def facts(self) -> Mapping[str, str]:
        return {"steps of a window": " ".join(map(str, self.steps))}


def work_kinds(plan: Plan, graph: LayerGraph) -> list[int]:
    """Return the codes of the kinds of work in a plan's bubbles."""
    asked = options_of(plan)
    found = {one.kind for stage in range(len(plan.stages)) for one in items_of(plan, graph, stage)}
    if asked is not None:
        found |= {one.kind for work in step_works_of(plan) for one in work.rows(plan, graph, asked)}
    return sorted(found)


def owed_by(program: Program) -> FillsBubbles | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(NAME)
    return owed if isinstance(owed, FillsBubbles) else None
