"""How replicas agree: the cards of the methods in `weft.sync`."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.moves.move import Context, Move


def _dense_applies(context: Context) -> str | None:
    return "the plan already synchronises densely" if context.plan.sync.name == "dense" else None


def _dense_apply(context: Context) -> Plan:
    return context.plan.model_copy(update={"sync": Choice(name="dense")})


SYNCHRONISATION_MOVES: tuple[Move, ...] = (
    Move(
        name="sync dense",
        contract=Contract.EXACT,
        summary="Every replica adds the full gradients of all others, stage by stage, during backward.",
        source="Li et al., PyTorch Distributed, arXiv 2006.15704",
        verify="gradients equal one process (float64, 1e-9) for every (pp, dp) up to four ranks",
        applies=_dense_applies,
        apply=_dense_apply,
        purposes=frozenset(),
        asked_by=("sync.method", "dense"),
    ),
)
