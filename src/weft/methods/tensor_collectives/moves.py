"""The move that makes collectives inside layers instructions of the program."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.methods.tensor_collectives.program import NAME, Way, way_of
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    plan = context.plan
    if all(plan.grid(stage).tensor == 1 for stage in range(len(plan.stages))):
        return "no ranks divide layers"
    return None if way_of(plan) == "inside" else "collectives inside layers are instructions already"


def _applied(way: Way) -> Move:
    def apply(context: Context) -> Plan:
        choice = Choice(name=NAME, options={"run": way})
        return context.plan.model_copy(update={"methods": (*context.plan.methods, choice)})

    beside = way == "overlapped"
    return Move(
        name="overlap tensor collectives" if beside else "run tensor collectives between segments",
        contract=Contract.EXACT,
        summary="Passes are cut where tensor ranks exchange, and what they exchange is an instruction"
        + (", beside which gradients of weights are computed." if beside else "."),
        source="Shoeybi et al., Megatron-LM, arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198",
        verify="weights equal those of collectives inside computations (float64 1e-12)",
        applies=_applies,
        apply=apply,
        purposes=frozenset(),
    )


MOVES: tuple[Move, ...] = (_applied("instructions"), _applied("overlapped"))
