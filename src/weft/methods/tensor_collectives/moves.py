"""The moves that make collectives inside layers instructions of the program."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.methods.tensor_collectives.program import NAME, Way, way_of
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    plan = context.plan
    if max(plan.tensor_degrees) == 1:
        return "no ranks divide layers"
    return None if way_of(plan) == "inside" else "collectives inside layers are instructions already"


def _applied(way: Way, name: str, beside: str) -> Move:
    def apply(context: Context) -> Plan:
        choice = Choice(name=NAME, options={"run": way})
        return context.plan.model_copy(update={"methods": (*context.plan.methods, choice)})

    cut = "Passes are cut where tensor ranks exchange, and what they exchange is an instruction"
    return Move(
        name=name,
        contract=Contract.EXACT,
        summary=f"{cut}{beside}.",
        source="Shoeybi et al., Megatron-LM, arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198",
        verify="weights equal those of collectives inside computations bit by bit",
        applies=_applies,
        apply=apply,
        purposes=frozenset(),
    )


MOVES: tuple[Move, ...] = (
    _applied("instructions", "run tensor collectives between segments", ""),
    _applied("overlapped", "overlap tensor collectives", ", beside which gradients of weights are computed"),
    _applied("interleaved", "interleave micro-batches", ", beside which another micro-batch computes"),
)
