"""The combinations that expert ranks refuse."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.loss_choice import other_choices
from weft.describe.plan import EXPERT_BALANCE, EXPERT_EXCHANGES, GRADIENT_NORM, MICRO_BATCH_CLIPPING, Plan
from weft.describe.plan_file import PlanRule, listed
from weft.describe.units import shown
from weft.errors import Violation, nearest_divisor
from weft.moves.composition import Composition

_METHOD = "expert parallelism"
_OTHERS = "other methods take the parameters of experts for those of all ranks"
# The methods that know which ranks divide the experts.
_ALLOWED = (GRADIENT_NORM, EXPERT_BALANCE, EXPERT_EXCHANGES, MICRO_BATCH_CLIPPING)


def _samples(job: Job, layout: Layout) -> str | None:
    sizes = {layout.micro_batch_size // parts for parts in layout.splits or (1,)}
    odd = sorted(size for size in sizes if size % layout.ep)
    if not odd:
        return None
    nearest = nearest_divisor(layout.ep, *sizes)
    return f"ep {layout.ep} does not divide {listed(odd)} samples of a micro-batch; nearest ep: {nearest}"


def _methods(job: Job, layout: Layout) -> str | None:
    others = [one.name for one in layout.methods_beside(job.methods) if one.name not in _ALLOWED]
    if layout.ep == 1 or not others:
        return None
    return f"ep {layout.ep}: {_OTHERS}; without {', '.join(others)}, or nearest ep: 1"


def _layer_choices(job: Job, layout: Layout) -> str | None:
    others = [one.name for one in other_choices(job.layer_choices)]
    if layout.ep == 1 or not others:
        return None
    return f"ep {layout.ep}: {_OTHERS}; without {', '.join(others)}, or nearest ep: 1"


def _synchronised(job: Job, layout: Layout) -> str | None:
    if layout.ep == 1 or layout.sync == DENSE:
        return None
    return f"ep {layout.ep}: {_OTHERS}; nearest sync: {DENSE}"


def _tied(job: Job, layout: Layout) -> str | None:
    if layout.ep == 1 or not job.graph.tied or layout.stages == 1:
        return None
    return f"ep {layout.ep}: stages that share a weight have copies of it; nearest ep: 1"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield what a plan that was edited by hand must not contain."""
    if plan.ep == 1:
        return
    for stage in range(len(plan.stages)):
        if (size := plan.size_of(stage)) % plan.ep:
            problem = f"{plan.ep} expert ranks do not divide {shown(size)} samples of a micro-batch"
            yield Violation(f"plan: stages[{stage}]", problem, shown(nearest_divisor(plan.ep, size)))
    others = [one.name for one in plan.methods if one.name not in _ALLOWED]
    others += [one.name for one in other_choices(plan.layer_choices)]
    if others or plan.sync.name != DENSE:
        yield Violation("plan: mesh.ep", f"{_OTHERS}; with {', '.join([*others, plan.sync.name])}", "1")
    if graph.tied and len(plan.stages) > 1:
        yield Violation("plan: mesh.ep", "stages that share a weight have copies of it", "1")


RULES = (
    Composition(
        method=_METHOD, other="odd micro-batches", reason="ranks have equal samples", refuse=_samples
    ),
    Composition(method=_METHOD, other="other methods", reason=_OTHERS, refuse=_methods),
    Composition(method=_METHOD, other="kernels of layers", reason=_OTHERS, refuse=_layer_choices),
    Composition(method=_METHOD, other="other synchronisation", reason=_OTHERS, refuse=_synchronised),
    Composition(method=_METHOD, other="tied weights of stages", reason="copies differ", refuse=_tied),
    PlanRule(refuse=_problems_of),
)
