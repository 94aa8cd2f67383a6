"""The rules of sharding for layouts and plans: more than one replica, and whole islands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule, listed
from weft.describe.synchronisation import keeps_gradients_local, reduction_problem
from weft.describe.units import counted
from weft.errors import Violation
from weft.methods.sharding.program import STEPS_APART
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of


def _nobody(job: Job, layout: Layout) -> str | None:
    if layout.sharding == "zero-0" or replicas_of(layout) > 1:
        return None
    return f"{layout.sharding} shares states out over replicas, and dp is 1; nearest sharding: zero-0"


def _not_whole(job: Job, layout: Layout) -> str | None:
    found = _refuse_island(layout, replicas_of(layout))
    return None if found is None else f"{found.problem}; nearest {found.where}: {found.nearest}"


def _steps_apart(job: Job, layout: Layout) -> str | None:
    if layout.sharding == "zero-0" or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{layout.sharding}: {STEPS_APART}; nearest sharding: zero-0"


def _not_plain(job: Job, layout: Layout) -> str | None:
    found = reduction_problem(job.reduce_precision, job.precision, layout.sync)
    return None if found is None else f"{found.problem}; nearest {found.where}: {found.nearest}"


def _refuse_island(decided: Layout | Plan, replicas: int) -> Violation | None:
    """Return why `replicas` cannot shard in such islands, with the nearest change, or None if they can."""
    island = decided.island
    if island is None:
        return None
    if decided.sharding == "zero-0":
        problem = f"islands of {counted(island, 'replica')} share states out, and zero-0 shares nothing"
        return Violation("sharding", problem, "zero-1")
    if island == 1:
        return Violation("island", "an island of 1 replica has nobody to share with", "2")
    if replicas % island:
        sizes = [size for size in range(2, replicas + 1) if replicas % size == 0]
        near = min(sizes, key=lambda size: abs(size - island))
        problem = f"{counted(replicas, 'replica')} cannot make whole islands of {island}"
        return Violation("island", problem, str(near))
    return None


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield the problems of a plan's sharding; its stages may differ in their number of replicas."""
    copies = [len(stage.replicas) for stage in plan.stages]
    single = [index for index, count in enumerate(copies) if count == 1]
    if plan.sharding != "zero-0" and single:
        problem = f"{plan.sharding} shares states out over replicas; stages {listed(single)} have one"
        yield Violation("plan: sharding", problem, "zero-0")
    if plan.sharding != "zero-0" and keeps_gradients_local(plan.sync):
        yield Violation("plan: sharding", f"{plan.sharding}: {STEPS_APART}", "zero-0")
    sizes = sorted({count for count in copies if count > 1 or plan.sharding == "zero-0"})
    refused = (_refuse_island(plan, size) for size in sizes)
    yield from (replace(one, where="plan: island") for one in dict.fromkeys(refused) if one is not None)


RULES = (
    Composition(
        method="sharding", other="one replica", reason="there is nobody to share states with", refuse=_nobody
    ),
    Composition(
        method="sharding",
        other="islands",
        reason="islands are whole, of two replicas or more, and share something out",
        refuse=_not_whole,
    ),
    Composition(
        method="sharding",
        other="local gradients",
        reason=STEPS_APART,
        refuse=_steps_apart,
    ),
    Composition(
        method="reduce_precision",
        other="other ways to agree than dense",
        reason="they decide themselves what replicas send",
        refuse=_not_plain,
    ),
    PlanRule(refuse=_problems_of),
)
