"""Exact moves that share the states of a stage out over its replicas (ZeRO)."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Plan, Sharding
from weft.errors import InputError
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Move
from weft.moves.sharers import island_on_nodes


def _sharding_move(name: str, sharding: Sharding, summary: str) -> Move:
    def applies(context: Context) -> str | None:
        plan = context.plan
        # The names of the stages of sharding rise with what is shared out.
        if plan.sharding >= sharding:
            return f"the plan already has {plan.sharding}"
        if sharding != "zero-1" and "reductions" in plan.blocking:
            return "the plan reduces gradients at the step's end, until when all of them must stay"
        fewest = min(len(stage.replicas) for stage in plan.stages)
        return "a stage has one replica, and nobody to share its states with" if fewest == 1 else None

    def apply(context: Context) -> Plan:
        return context.plan.model_copy(update={"sharding": sharding})

    return Move(
        name=name,
        contract=Contract.EXACT,
        summary=summary,
        source="Rajbhandari et al., ZeRO, arXiv 1910.02054",
        verify="states, gathers and reductions of every rank equal the closed forms of the method",
        applies=applies,
        apply=apply,
        asked_by=("plan.sharding", sharding),
    )


def _island(context: Context) -> int | None:
    """The replicas of a node, where they can be an island."""
    try:
        return island_on_nodes(context.cluster, layout_of(context.plan))
    except InputError:
        return None


def _islands_apply(context: Context) -> str | None:
    plan = context.plan
    if plan.sharding == "zero-0":
        return "replicas share nothing out"
    if plan.island is not None:
        return f"the plan already has islands of {plan.island}"
    if _island(context) is None:
        return "no node holds several replicas of every stage, but not all of them"
    return None


def _make_islands(context: Context) -> Plan:
    return context.plan.model_copy(update={"island": _island(context)})


MOVES: tuple[Move, ...] = (
    _sharding_move(
        "shard optimizer states",
        "zero-1",
        "Every replica keeps and steps its share of the optimizer's states; weights are gathered after it.",
    ),
    _sharding_move(
        "shard gradients",
        "zero-2",
        "Replicas also keep only their share of the summed gradients, beside buffers for what is computed.",
    ),
    _sharding_move(
        "shard weights",
        "zero-3",
        "Replicas also keep only their share of the weights and gather a stage's before computing with it.",
    ),
    Move(
        name="shard inside nodes",
        contract=Contract.EXACT,
        summary="Replicas share states out inside their node, and add up each share with other nodes.",
        source="Zhao et al., PyTorch FSDP, arXiv 2304.11277; Zhang et al., MiCS, arXiv 2205.00119",
        verify="losses and parameters equal those of one process (float64 1e-9)",
        applies=_islands_apply,
        apply=_make_islands,
    ),
)
