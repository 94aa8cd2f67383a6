"""The move that lets replicas send about four bits for each gradient and each weight."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.describe.synchronisation import derived_options
from weft.methods.sdp4bit.options import NAME
from weft.methods.sdp4bit.rules import UNSHARED
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    plan = context.plan
    if plan.sync.name == NAME:
        return "the plan already sends few bits"
    return UNSHARED if plan.sharding not in ("zero-1", "zero-2") or plan.island is not None else None


def _apply(context: Context) -> Plan:
    plan, sync = context.plan, Choice(name=NAME)
    derived = derived_options(sync, plan.stages, context.cluster)
    return plan.model_copy(update={"sync": Choice(name=NAME, options=derived)})


MOVES: tuple[Move, ...] = (
    Move(
        name="send few bits",
        contract=Contract.EMPIRICAL,
        summary="Replicas quantise gradients and changes of weights to about 4 bits before they send them.",
        source="Jia et al., SDP4Bit, arXiv 2410.15526",
        verify="weights equal those of one process that quantises the same numbers (bit for bit)",
        applies=_applies,
        apply=_apply,
        purposes=frozenset(),
        asked_by=("sync.method", NAME),
    ),
)
