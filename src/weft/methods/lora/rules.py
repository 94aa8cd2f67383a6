"""The rules of low-rank adaptation for layouts and plans."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.lora.options import NAME, read_options
from weft.moves.composition import Composition

SHARDED = "frozen weights stay whole on every rank; there are no gathers to save them"
IN_PIECES = "layers that drop out numbers do not run in pieces"
COLLECTIVES = "tensor-collectives"
# Methods whose parts of a job would have frozen weights, or low-rank products beside their own.
_OTHERS = {
    "auxiliary-head": "an auxiliary head is trained from random values, beside frozen layers",
    "fp8-linears": "products in 8 bits replace the layers that low-rank products stand beside",
    "power-sgd": "the gradients of low-rank products are low-rank already",
}


def _asks(methods: tuple[Choice, ...]) -> bool:
    return any(choice.name == NAME for choice in methods)


def _other(job: Job, layout: Layout) -> str | None:
    if not _asks(job.methods):
        return None
    chosen = (one.name for one in job.layer_choices)
    names = {*(one.name for one in job.methods), *chosen, layout.sync}
    found = next((name for name in _OTHERS if name in names), None)
    return None if found is None else f"{NAME}: not with {found}: {_OTHERS[found]}"


def _sharded(job: Job, layout: Layout) -> str | None:
    if _asks(job.methods) and layout.sharding == "zero-3":
        return f"{NAME}: {SHARDED}; nearest sharding: zero-2"
    return None


def _in_pieces(job: Job, layout: Layout) -> str | None:
    asked = {one.name: one for one in layout.methods_beside(job.methods)}
    if NAME not in asked or COLLECTIVES not in asked or not read_options(asked[NAME]).dropout:
        return None
    return f"{NAME}.dropout: {IN_PIECES}; nearest: no {COLLECTIVES}"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    choice = plan.method(NAME)
    if choice is None:
        if graph.has_frozen_layers:
            yield Violation("plan: methods", "the job has frozen layers, the plan has none", NAME)
        return
    try:
        low_rank = read_options(choice)
    except InputError as error:
        yield from error.violations
        return
    if low_rank.dropout and plan.method(COLLECTIVES) is not None:
        yield Violation("plan: methods", f"{NAME}.dropout: {IN_PIECES}", f"no {COLLECTIVES}")
    if plan.sharding == "zero-3":
        yield Violation("plan: sharding", f"{NAME}: {SHARDED}", "zero-2")


RULES = (
    Composition(
        method="low-rank adaptation",
        other="auxiliary head, products in 8 bits, PowerSGD",
        reason="; ".join(_OTHERS.values()),
        refuse=_other,
    ),
    Composition(
        method="low-rank adaptation", other="sharded weights (zero-3)", reason=SHARDED, refuse=_sharded
    ),
    Composition(
        method="low-rank adaptation with dropout",
        other="collectives of tensor ranks as instructions",
        reason=IN_PIECES,
        refuse=_in_pieces,
    ),
    PlanRule(refuse=_problems_of),
)
