"""`Move`: a typed edit of a plan, with a card that states its contract.

Every method of weft is a move: schedules, data parallelism, synchronisation, later clipping, growth, pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from weft.describe.cluster import Cluster
from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.loss_choice import other_choices
from weft.describe.plan import Plan
from weft.describe.synchronisation import asked_options

if TYPE_CHECKING:
    from weft.describe.layout import Layout


class Purpose(StrEnum):
    """The purpose of a planner that requests neighbours of a layout."""

    FASTER = "faster"  # a small change of a layout that fits
    SMALLER = "smaller"  # one notch less memory
    LARGER = "larger"  # a shorter step for memory that is left


@dataclass(frozen=True, slots=True)
class Edit:
    """A change in words, such as ``zero-1 -> zero-2``, and the resulting layout, which may be illegal."""

    words: str
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs for a move's decision to apply."""

    plan: Plan
    graph: LayerGraph
    cluster: Cluster

    @property
    def job(self) -> Job:
        """The job of the plan."""
        plan = self.plan
        return Job(
            graph=self.graph,
            cluster=self.cluster,
            global_batch=plan.global_batch,
            sequence=plan.sequence,
            precision=plan.precision,
            reduce_precision=plan.reduce_precision,
            methods=plan.methods,
            optimizer=plan.optimizer,
            sync_options=asked_options(plan.sync),
            layer_choices=other_choices(plan.layer_choices),
            launch=plan.launch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One method's card.

    Attributes:
        name: the name for users and tables.
        contract: the properties of the training that it preserves.
        summary: one sentence.
        source: the paper or system it comes from.
        verify: the test of the contract.
        applies: returns None, or the reason why the move cannot be applied.
        apply: returns the edited plan. The card claims nothing about its step: effects are the difference of
            two simulations.
        edits: yields edits of a layout, the whole move first, then parts of it; None if it edits plans only.
            `weft.moves.edits.layout_move` makes moves with edits.
        purposes: the purposes for which planners try it; empty if their search spaces contain it, or if it
            defines the training, such as clipping.
        asked_by: the run-file key and the word that request the move, such as ("sync.method", "dense"); None
            if users cannot request it.
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
