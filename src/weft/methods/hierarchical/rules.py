"""The rules of hierarchical sums, and the move to them: whole nodes of several replicas, no islands."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.contract import Contract
from weft.describe.plan import Plan
from weft.describe.synchronisation import DENSE
from weft.describe.units import counted
from weft.errors import Violation
from weft.methods.hierarchical.options import NAME, HierarchicalOptions
from weft.moves.move import Context
from weft.moves.synchronisation import NOBODY, Replication, SyncChoice, SyncRefusal

ISLANDS = "islands have two levels already"


def _refuse(options: HierarchicalOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    return None if of.island is None else SyncRefusal(ISLANDS)


def _no_whole_nodes(plan: Plan, options: HierarchicalOptions) -> Iterator[Violation]:
    counts = {len(stage.replicas) for stage in plan.stages}
    for count in sorted(one for one in counts if one % options.replicas_per_node):
        problem = f"{counted(count, 'replica')} cannot make whole nodes of {options.replicas_per_node}"
        yield Violation("plan: sync.replicas_per_node", problem, "1")


_CHOICE = SyncChoice(method=NAME, table=HierarchicalOptions, refuse=_refuse, also=_no_whole_nodes)


def _nothing_to_gain(context: Context) -> str | None:
    plan = context.plan
    if plan.sync.name != DENSE or plan.reduce_precision is not None:
        return "replicas send other numbers than whole gradients"
    replicas = min(len(stage.replicas) for stage in plan.stages)
    inside = _CHOICE.chosen(context).options["replicas_per_node"]
    return None if inside not in (1, replicas) else "no node has several of the replicas, but not all"


RULES = _CHOICE.rules(other="one replica, islands", reason=f"{NOBODY}; {ISLANDS}")
MOVES = (
    _CHOICE.move(
        name="add up inside nodes first",
        contract=Contract.EXACT,
        summary="Replicas add up gradients inside their node, then between nodes, and spread sums inside.",
        source="Goyal et al., Accurate, Large Minibatch SGD, arXiv 1706.02677, section 4",
        verify="gradients equal those of one process (float64 1e-9)",
        otherwise=_nothing_to_gain,
    ),
)
