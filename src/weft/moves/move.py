"""`Move`: a typed edit of a plan, with a card that says what it promises.

Every method of weft is a move: schedules, data parallelism, synchronisation, later clipping, growth, pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from weft.describe.cluster import Cluster
from weft.describe.contract import Contract
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan

if TYPE_CHECKING:
    from weft.describe.layout import Layout
    from weft.moves.job import Job


class Purpose(StrEnum):
    """What a planner wants when it asks for neighbours of a layout."""

    FASTER = "faster"  # a small change of a layout that fits
    SMALLER = "smaller"  # one notch less memory
    LARGER = "larger"  # a shorter step for memory that is left


@dataclass(frozen=True, slots=True)
class Edit:
    """A change in words, such as ``zero-1 -> zero-2``, and the layout it leads to, which may be illegal."""

    words: str
    layout: Layout


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
        edits: what it makes of a layout, the whole move first, then parts of it; None where it edits plans
            only. A move that has edits is best made by `weft.moves.edits.layout_move`.
        purposes: what planners try it for; none where their spaces hold it, or where it is the training
            itself, such as clipping.
        asked_by: a key of the run file and the word that asks for the move, such as ("sync.method", "dense");
            None where users cannot ask for it.
    """

    name: str
    contract: Contract
    summary: str
    source: str
    verify: str
    applies: Callable[[Context], str | None]
    apply: Callable[[Context], Plan]
    edits: Callable[[Job, Layout], Iterable[Edit]] | None = None
    purposes: frozenset[Purpose] = frozenset({Purpose.FASTER, Purpose.SMALLER})
    asked_by: tuple[str, str] | None = None
