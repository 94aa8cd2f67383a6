"""The move that lets steps wait for the norm of the whole gradient, to clip it."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.methods.gradient_norm.program import NAME
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    return "steps already wait for the norm of the gradient" if context.plan.method(NAME) else None


def _apply(context: Context) -> Plan:
    methods = (*context.plan.methods, Choice(name=NAME))
    return context.plan.model_copy(update={"methods": methods})


MOVES: tuple[Move, ...] = (
    Move(
        name="clip gradient norm",
        contract=Contract.EMPIRICAL,
        summary="All ranks find the norm of the whole gradient before they step, and scale it to a limit.",
        source="Pascanu et al., On the difficulty of training recurrent neural networks, arXiv 1211.5063",
        verify="norms and parameters equal those of one process that clips (float64 1e-9)",
        applies=_applies,
        apply=_apply,
        purposes=frozenset(),
    ),
)
