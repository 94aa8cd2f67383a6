"""The moves that let replicas step by themselves between averagings of their weights."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.methods.local_averaging.options import NAME
from weft.methods.local_averaging.program import NOBODY
from weft.moves.move import Context, Move

# Default number of steps between two averagings.
_EVERY = 8


def averaging_move(method: str, *, name: str, summary: str, source: str) -> Move:
    """Return the move to a method of this family, with its default options."""

    def applies(context: Context) -> str | None:
        plan = context.plan
        if plan.sync.name == method:
            return f"the plan already has sync {method}"
        if any(len(stage.replicas) == 1 for stage in plan.stages):
            return NOBODY
        return None

    def apply(context: Context) -> Plan:
        sync = Choice(name=method, options={"every": _EVERY})
        return context.plan.model_copy(update={"sync": sync})

    return Move(
        name=name,
        contract=Contract.EMPIRICAL,
        summary=summary,
        source=source,
        verify="weights equal those of one process that steps every replica by itself (float64 1e-9)",
        applies=applies,
        apply=apply,
        purposes=frozenset(),
        asked_by=("sync.method", method),
    )


MOVES: tuple[Move, ...] = (
    averaging_move(
        NAME,
        name="average weights",
        summary="Replicas step with their own gradients and average their weights every so many steps.",
        source="Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767",
    ),
)
