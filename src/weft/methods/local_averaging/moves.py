"""The moves that let replicas step by themselves between averagings of their weights."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.synchronisation import LocalSteps
from weft.methods.local_averaging.options import NAME
from weft.methods.local_averaging.program import NOBODY
from weft.moves.move import Move
from weft.moves.synchronisation import SyncChoice, SyncRefusal

# Default number of steps between two averagings.
_EVERY = 8


def averaging_move(method: str, *, name: str, summary: str, source: str) -> Move:
    """Return the move to a method of this family, with its default options."""
    choice = SyncChoice(
        method=method,
        table=LocalSteps,
        refuse=lambda options, of: SyncRefusal(NOBODY) if of.replicas == 1 else None,
        moved_options={"every": _EVERY},
    )
    return choice.move(
        name=name,
        contract=Contract.EMPIRICAL,
        summary=summary,
        source=source,
        verify="weights equal those of one process that steps every replica by itself (float64 1e-9)",
    )


MOVES: tuple[Move, ...] = (
    averaging_move(
        NAME,
        name="average weights",
        summary="Replicas step with their own gradients and average their weights every so many steps.",
        source="Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767",
    ),
)
