"""The move that adds up gradients inside nodes before they go between nodes."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import Choice, Plan
from weft.describe.synchronisation import DENSE, derived_options
from weft.methods.hierarchical.options import NAME
from weft.methods.hierarchical.rules import problem_of
from weft.moves.move import Context, Move


def _sync(context: Context) -> Choice:
    options = derived_options(Choice(name=NAME), context.plan.stages, context.cluster)
    return Choice(name=NAME, options=options)


def _applies(context: Context) -> str | None:
    plan = context.plan
    if plan.sync.name != DENSE or plan.reduce_precision is not None:
        return "replicas send other numbers than whole gradients"
    replicas = min(len(stage.replicas) for stage in plan.stages)
    problem = problem_of(plan.island, replicas)
    if problem is not None:
        return problem
    inside = _sync(context).options["replicas_per_node"]
    return None if inside not in (1, replicas) else "no node has several of the replicas, but not all"


def _apply(context: Context) -> Plan:
    return context.plan.model_copy(update={"sync": _sync(context)})


MOVES: tuple[Move, ...] = (
    Move(
        name="add up inside nodes first",
        contract=Contract.EXACT,
        summary="Replicas add up gradients inside their node, then between nodes, and spread sums inside.",
        source="Goyal et al., Accurate, Large Minibatch SGD, arXiv 1706.02677, section 4",
        verify="gradients equal those of one process (float64 1e-9)",
        applies=_applies,
        apply=_apply,
        purposes=frozenset(),
        asked_by=("sync.method", NAME),
    ),
)
