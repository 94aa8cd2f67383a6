"""The move that makes a training report micro-batch norms, and the combinations that it refuses."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Choice, Plan
from weft.describe.synchronisation import keeps_gradients_local
from weft.methods.micro_batch_norms.program import NAME
from weft.moves.composition import Composition
from weft.moves.move import Context, Move


def _applies(context: Context) -> str | None:
    return "norms of micro-batches are told already" if context.plan.method(NAME) else None


def _apply(context: Context) -> Plan:
    methods = (*context.plan.methods, Choice(name=NAME))
    return context.plan.model_copy(update={"methods": methods})


def _tied(job: Job, layout: Layout) -> str | None:
    """Refuse copies of one weight: they see parts of its gradient at two times; squares do not add up."""
    chosen = any(choice.name == NAME for choice in job.methods)
    if not chosen or layout.stages == 1 or not job.graph.tied:
        return None
    problem = f"{layout.stages} stages have a weight in common, and each sees a part of its gradient"
    return f"{NAME}: {problem}; nearest pp: 1"


def _stepping_alone(job: Job, layout: Layout) -> str | None:
    """Refuse replicas with different weights: no gradient of the whole batch contains a micro-batch's."""
    chosen = any(choice.name == NAME for choice in job.methods)
    if not chosen or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{NAME}: replicas step by themselves under sync {layout.sync}; nearest sync: {DENSE}"


MOVES: tuple[Move, ...] = (
    Move(
        name="tell micro-batch norms",
        contract=Contract.EXACT,
        summary="Ranks square the gradients of a micro-batch before they add them up, and tell its norm.",
        source="McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162",
        verify="norms equal those of one process (float64 1e-9); weights equal those without, bit by bit",
        applies=_applies,
        apply=_apply,
        purposes=frozenset(),
    ),
)

COMPOSITIONS = (
    Composition(
        method="micro-batch norms",
        other="tied weights of several stages",
        reason="each stage sees a part of the weight's gradient, at another time",
        refuse=_tied,
    ),
    Composition(
        method="micro-batch norms",
        other="replicas that step by themselves",
        reason="their weights differ, and so do the gradients that a micro-batch would have on each",
        refuse=_stepping_alone,
    ),
)
