"""`Move`: a typed edit of a plan, with a card that says what it promises.

Every method of weft is a move: schedules, data parallelism, synchronisation, later clipping, growth, pruning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.describe.cluster import Cluster
from weft.describe.contract import Contract
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a move may look at to decide whether it applies."""

    plan: Plan
    graph: LayerGraph
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One method's card.

    Attributes:
        name: how users and tables call it.
        contract: what it keeps.
        summary: one sentence.
        source: the paper or system it comes from.
        verify: how the contract is tested.
        applies: None, or the reason why the move cannot be applied.
        apply: the edited plan. Nothing is claimed of its step: effects are the difference of two
            simulations.
        asked_by: a key of the run file and the word that asks for the move, such as ("sync.method", "dense");
            None where users cannot ask for it.
        searched: whether planners try it; False for what is the training itself, such as clipping.
    """

    name: str
    contract: Contract
    summary: str
    source: str
    verify: str
    applies: Callable[[Context], str | None]
    apply: Callable[[Context], Plan]
    asked_by: tuple[str, str] | None = None
    searched: bool = True
