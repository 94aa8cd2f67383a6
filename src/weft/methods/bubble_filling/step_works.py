"""`StepWork`: work that every step does in its bubbles, stage by stage or through all stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.bundles import parts
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.bubble_filling.options import BubbleOptions, options_of
from weft.program.program import Owed


class ThroughStages(NamedTuple):
    """The codes of the kinds that send and receive what a stage's piece leaves for later stages."""

    send: int
    receive: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one kind that each stage has in every step.

    Attributes:
        kind: the code of the rows' kind.
        pieces: the number of rows of a stage.
        before_step: True: they come before the stage's optimizer step, and see the weights of the last one.
        messages: of pieces that go through all stages; None: stages do not wait for each other. A piece that
            goes through all stages is the row's `micro_batch`, another one is its `part`.
    """

    kind: int
    pieces: int
    before_step: bool = False
    messages: ThroughStages | None = None


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of every step that a method contributes (`weft.bundles`), beside its `step_pass`.

    A user asks for it by its name in `[bubble] work`; it needs no table.

    Attributes:
        method: the method's name, also in `[bubble] work`.
        rows: returns the rows of each stage, in the order in which a stage does them.
    """

    method: str
    rows: Callable[[Plan, LayerGraph, BubbleOptions], Sequence[StepRows]]


@dataclass(frozen=True, kw_only=True)
class WorksInSteps(Owed):
    """The obligation of every stage to do all rows of a work in every step."""

    rows: tuple[StepRows, ...]

    @property
    def facts(self) -> Mapping[str, str]:
        return {"pieces in a step": " ".join(str(one.pieces) for one in self.rows)}


def step_works_of(plan: Plan) -> tuple[StepWork, ...]:
    """Return the works of every step that a plan asks for, by name."""
    asked = options_of(plan)
    names = () if asked is None else asked.works
    found = (one for one in parts(StepWork) if one.method in names)
    return tuple(sorted(found, key=lambda one: one.method))
