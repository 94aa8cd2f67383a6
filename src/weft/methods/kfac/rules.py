"""The rules of K-FAC: ranks with all tokens of their samples, and one order for all replicas."""

from __future__ import annotations

from collections.abc import Iterator

from weft.bundles import parts
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.loss_choice import other_choices
from weft.describe.plan import GRADIENT_NORM, SCALED, LayerChoice, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.options import NAME as BUBBLES
from weft.methods.bubble_filling.works import BubbleWork
from weft.methods.kfac.linears import read_treated
from weft.methods.kfac.options import NAME, options_of
from weft.moves.composition import Composition
from weft.moves.layout import shares_of

_ALLOWED = (BUBBLES, GRADIENT_NORM)
_METHOD = "K-FAC"


def _problems(
    *,
    context: int,
    expert: int,
    splits: int,
    shares: set[int],
    sync: str,
    precision: str,
    others: list[str],
) -> Iterator[Violation]:
    """Yield why a layout or a plan cannot take the curvature of its layers."""
    for axis, ranks in (("cp", context), ("ep", expert)):
        if ranks > 1:
            yield Violation(axis, f"{ranks} ranks have parts of a layer's tokens", "1")
    if splits > 1:
        yield Violation("splits", "stages that split micro-batches leave tensors of parts", "no splits")
    if len(shares) > 1:
        problem = "replicas with unlike shares of the batch have unlike bubbles"
        yield Violation("micro_batches_per_replica", problem, "leave it out")
    if sync != DENSE:
        yield Violation("sync", f"{sync}: replicas add up whole gradients before they step", DENSE)
    if precision in SCALED:
        yield Violation("precision", f"{precision}: losses have a factor that changes", "bf16")
    if others:
        yield Violation("methods", f"{', '.join(others)}: not with inverse curvature", "leave it out")


def _others(names: list[str], choices: tuple[LayerChoice, ...]) -> list[str]:
    works = {one.method for one in parts(BubbleWork)}
    found = [name for name in names if name not in works and name not in _ALLOWED]
    return [*found, *(one.name for one in other_choices(choices))]


def _of_layout(job: Job, layout: Layout) -> str | None:
    methods = layout.methods_beside(job.methods)
    if not any(one.name == NAME for one in methods):
        return None
    found = _problems(
        context=layout.cp,
        expert=layout.ep,
        splits=max(layout.splits, default=1),
        shares=set(shares_of(job, layout)),
        sync=layout.sync,
        precision=job.precision,
        others=_others([one.name for one in methods], job.layer_choices),
    )
    first = next(found, None)
    if first is None:
        return None
    return f"{NAME}: {first.where}: {first.problem}; nearest {first.where}: {first.nearest}"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield what a plan that was edited by hand must not contain."""
    try:
        options = options_of(plan)
        if options is None:
            return
        read_treated(options.linears)
    except InputError as error:
        yield from error.violations
        return
    for one in _problems(
        context=plan.cp,
        expert=plan.ep,
        splits=max(stage.splits for stage in plan.stages),
        shares={replica.micro_batches for stage in plan.stages for replica in stage.replicas},
        sync=plan.sync.name,
        precision=plan.precision,
        others=_others([one.name for one in plan.methods], plan.layer_choices),
    ):
        yield Violation(f"plan: {one.where}", f"{NAME}: {one.problem}", one.nearest)


RULES = (
    Composition(
        method=_METHOD,
        other="divided tokens, splits, unlike shares, fp16 and other methods",
        reason="a micro-batch leaves its rows on the tensor ranks of one replica",
        refuse=_of_layout,
    ),
    PlanRule(refuse=_problems_of),
)
