"""The exact move that trades a second forward pass for the memory of activations."""

from __future__ import annotations

from weft.describe.plan import Plan
from weft.moves.move import Context, Contract, Move


def _applies(context: Context) -> str | None:
    if all(stage.recompute == "full" for stage in context.plan.stages):
        return "every stage already recomputes its activations"
    return None


def _apply(context: Context) -> Plan:
    plan = context.plan
    stages = tuple(stage.model_copy(update={"recompute": "full"}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages, "prediction": None})


RECOMPUTE_MOVES: tuple[Move, ...] = (
    Move(
        name="recompute activations",
        contract=Contract.EXACT,
        summary="Micro-batches keep the inputs of layers only, and backward passes run layers forward again.",
        source="Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174",
        verify="kept bytes and backward times of every layer equal the closed forms of the method",
        applies=_applies,
        apply=_apply,
    ),
)
