"""Exact moves that trade a second forward pass, or part of it, for memory, and what they do not go with."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.moves.composition import Composition
from weft.moves.job import Job
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    if all(stage.recompute == "full" for stage in context.plan.stages):
        return "every stage already recomputes its activations"
    return None


def _applies_selectively(context: Context) -> str | None:
    if all(stage.recompute != "none" for stage in context.plan.stages):
        return "every stage already recomputes something"
    if not context.graph.knows_products:
        return "the model does not say what its products leave"
    return None


def _apply(context: Context) -> Plan:
    return _recomputing(context.plan, {"none": "full", "selective": "full"})


def _apply_selectively(context: Context) -> Plan:
    return _recomputing(context.plan, {"none": "selective"})


def _recomputing(plan: Plan, instead: dict[str, str]) -> Plan:
    stages = tuple(
        stage.model_copy(update={"recompute": instead.get(stage.recompute, stage.recompute)})
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


MOVES: tuple[Move, ...] = (
    Move(
        name="recompute activations",
        contract=Contract.EXACT,
        summary="Micro-batches keep the inputs of layers only, and backward passes run layers forward again.",
        source="Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174",
        verify="kept bytes and backward times of every layer equal the closed forms of the method",
        applies=_applies,
        apply=_apply,
        asked_by=("plan.recompute", "full"),
    ),
    Move(
        name="recompute selectively",
        contract=Contract.EXACT,
        summary="Micro-batches keep what products give, and backward passes make the rest again.",
        source="Korthikanti et al., arXiv 2205.05198, section 5",
        verify="gradients equal those of kept layers bit by bit; kept bytes equal the closed forms",
        applies=_applies_selectively,
        apply=_apply_selectively,
        asked_by=("plan.recompute", "selective"),
    ),
)


def _unknown_products(job: Job, layout: Layout) -> str | None:
    if "selective" not in layout.recomputes or job.graph.knows_products:
        return None
    return "the model does not say what its products leave; nearest recompute: full"


COMPOSITIONS = (
    Composition(
        method="recomputation",
        other="models of others",
        reason="selective recomputation needs a model that says what its products leave",
        refuse=_unknown_products,
    ),
)
