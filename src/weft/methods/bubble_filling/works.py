"""`BubbleWork`: what a method wants done beside the passes of a pipeline, as rows of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.bundles import parts
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan
from weft.methods.bubble_filling.options import NAME, BubbleOptions
from weft.methods.bubble_filling.work import PassName, WorkItem
from weft.program.kinds import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRows:
    """An item of work of one stage: its rows in each window.

    Attributes:
        kind: the code of the rows' kind.
        part: which item of the stage this is, of those of its kind.
        by_micro_batch: True: one row for each micro-batch; False: one row.
        follows: the pass of its micro-batch, in the first step of a window, that each row needs.
        after: places in the stage's list of items that come before this one.
        bytes: the payload of a collective.
    """

    kind: int
    part: int
    by_micro_batch: bool = False
    follows: PassName | None = None
    after: tuple[int, ...] = ()
    bytes: int = 0

    def count(self, micro_batches: int) -> int:
        """Return the rows of a window."""
        return micro_batches if self.by_micro_batch else 1

    def behind(self, first: int) -> WorkRows:
        """Return the rows of an item of a list that is appended at this place to another."""
        return replace(self, after=tuple(first + place for place in self.after))

    def as_item(self, stage: int, pieces_s: Sequence[float], micro_batches: Sequence[int]) -> WorkItem:
        """Return the item for placers: seconds of its pieces, and the micro-batches of its passes."""
        return WorkItem(
            name=f"{KINDS[self.kind].words} {self.part}",
            stage=stage,
            pieces_s=tuple(pieces_s),
            micro_batches=tuple(micro_batches) if self.by_micro_batch else (),
            follows=self.follows,
            after=self.after,
        )


@dataclass(frozen=True, kw_only=True)
class BubbleWork:
    """Work that a method contributes (`weft.bundles`).

    Attributes:
        method: the method's name, also in `[bubble] work`.
        every: returns the steps from one time to the next where the work waits for no bubbles; None: the plan
            has no such work.
        items: returns the items of a stage.
    """

    method: str
    every: Callable[[Plan], int | None]
    items: Callable[[Plan, LayerGraph, int], Sequence[WorkRows]]


def works_of(plan: Plan) -> tuple[BubbleWork, ...]:
    """Return the works that a plan has, by name."""
    found = (one for one in parts(BubbleWork) if one.every(plan) is not None)
    return tuple(sorted(found, key=lambda one: one.method))


def items_of(plan: Plan, graph: LayerGraph, stage: int) -> list[WorkRows]:
    """Return the items of all works of a stage; `after` counts in this list."""
    found: list[WorkRows] = []
    for work in works_of(plan):
        first = len(found)
        found += (one.behind(first) for one in work.items(plan, graph, stage))
    return found


def with_options(plan: Plan, **options: int | float | str) -> Plan:
    """Return a plan that fills bubbles, with other options; of these, defaults are left out."""
    fields = BubbleOptions.model_fields
    default = {key for key, value in options.items() if value == fields[key].default}
    methods = list(plan.methods)
    for place, one in enumerate(methods):
        if one.name == NAME:
            kept = {key: value for key, value in {**one.options, **options}.items() if key not in default}
            methods[place] = Choice(name=NAME, options=kept)
    return plan.model_copy(update={"methods": tuple(methods)})
