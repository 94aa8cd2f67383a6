"""The rules of works of every step that copy the weights of a stage: whole ones, equal on all replicas."""

from __future__ import annotations

from collections.abc import Iterator

from weft.bundles import parts
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.plan import GRADIENT_NORM, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.options import NAME, options_of
from weft.methods.bubble_filling.works import BubbleWork
from weft.moves.composition import Composition

_ALLOWED = (NAME, GRADIENT_NORM)


def whole_weights(work: str) -> tuple[Composition, PlanRule]:
    """Return the rules of a work of every step that needs whole weights."""

    def of_layout(job: Job, layout: Layout) -> str | None:
        methods = layout.methods_beside(job.methods)
        bubbles = next((one for one in methods if one.name == NAME), None)
        if bubbles is None or work not in str(bubbles.options.get("work", "")).split(","):
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
        return f"{work}: {first.where}: {first.problem}; nearest {first.where}: {first.nearest}"

    def of_plan(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
        try:
            asked = options_of(plan)
        except InputError:
            return  # The rule of bubbles tells it.
        if asked is None or work not in asked.works:
            return
        for one in _problems(
            divided=max(len(replica.ranks) for stage in plan.stages for replica in stage.replicas),
            sharding=plan.sharding,
            sync=plan.sync.name,
            others=_others([one.name for one in plan.methods]),
        ):
            yield Violation(f"plan: {one.where}", f"{work}: {one.problem}", one.nearest)

    return (
        Composition(
            method=f"{work} in bubbles",
            other="divided layers, sharding, other synchronisation and other methods",
            reason="a rank copies whole weights",
            refuse=of_layout,
        ),
        PlanRule(refuse=of_plan),
    )


def _problems(*, divided: int, sharding: str, sync: str, others: list[str]) -> Iterator[Violation]:
    """Yield why no rank has whole weights to copy, or other methods keep some of their own."""
    if divided > 1:
        yield Violation("tp", f"{divided} ranks divide a replica, and its copy of weights", "1")
    if sharding != "zero-0":
        yield Violation("sharding", f"{sharding}: a copy of weights needs whole ones", "zero-0")
    if sync != DENSE:
        yield Violation("sync", f"{sync}: replicas may have unlike weights", DENSE)
    if others:
        yield Violation("methods", f"{', '.join(others)}: not with copies of weights", "leave it out")


def _others(names: list[str]) -> list[str]:
    works = {one.method for one in parts(BubbleWork)}
    return [name for name in names if name not in works and name not in _ALLOWED]
