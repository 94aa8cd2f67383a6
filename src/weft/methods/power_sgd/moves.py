"""The move that lets replicas send low-rank factors of the matrices of their gradients."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.methods.power_sgd.options import NAME
from weft.methods.power_sgd.rules import device_kinds, problem_of
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    plan = context.plan
    if plan.sync.name == NAME:
        return "the plan already sends factors"
    replicas = min(len(stage.replicas) for stage in plan.stages)
    kinds = device_kinds(context.cluster)
    found = problem_of(plan.sharding, plan.island, plan.precision, replicas, kinds)
    return None if found is None else found[0]


def _apply(context: Context) -> Plan:
    return context.plan.model_copy(update={"sync": Choice(name=NAME)})


MOVES: tuple[Move, ...] = (
    Move(
        name="send low-rank factors",
        contract=Contract.EMPIRICAL,
        summary="Replicas send two low-rank factors of each matrix of their gradients, and keep the rest.",
        source="Vogels et al., PowerSGD, arXiv 1905.13727",
        verify="weights equal those of one process that factors the same gradients (bit for bit)",
        applies=_applies,
        apply=_apply,
        purposes=frozenset(),
        asked_by=("sync.method", NAME),
    ),
)
