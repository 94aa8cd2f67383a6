"""The move that lets replicas step by themselves between averagings of their weights."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.methods.local_averaging.options import NAME
from weft.methods.local_averaging.program import NOBODY
from weft.moves.move import Context, Move

# Default number of steps between two averagings.
_EVERY = 8


def _applies(context: Context) -> str | None:
    plan = context.plan
    if plan.sync.name == NAME:
        return "the plan already averages weights"
    if any(len(stage.replicas) == 1 for stage in plan.stages):
        return NOBODY
    return None


def _apply(context: Context) -> Plan:
    sync = Choice(name=NAME, options={"every": _EVERY})
    return context.plan.model_copy(update={"sync": sync})


MOVES: tuple[Move, ...] = (
    Move(
        name="average weights",
        contract=Contract.EMPIRICAL,
        summary="Replicas step with their own gradients and average their weights every so many steps.",
        source="Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767",
        verify="weights equal those of one process that steps every replica by itself (float64 1e-9)",
        applies=_applies,
        apply=_apply,
        purposes=frozenset(),
        asked_by=("sync.method", NAME),
    ),
)
