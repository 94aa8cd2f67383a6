"""`Move`: a typed edit of a plan, with a card that says what it promises.

Every method of weft is a move: schedules, data parallelism, synchronisation, later clipping, growth, pruning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan


class Contract(IntEnum):
    """What a move keeps, strictest first; a goal of `contract = X` admits X and everything stricter."""

    EXACT = 0
    FUNCTION_PRESERVING = 1
    UNBIASED = 2
    EMPIRICAL = 3


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
        apply: the edited plan; its prediction is dropped, because effects are the difference of two
            simulations and never a claim.
    """

    name: str
    contract: Contract
    summary: str
    source: str
    verify: str
    applies: Callable[[Context], str | None]
    apply: Callable[[Context], Plan]
