"""`MeasuredChange`: how a run finds another plan by itself, in the steps that it has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.bundles import parts
from weft.describe.plan import Plan
from weft.timeline.timeline import Timeline

if TYPE_CHECKING:
    from weft.planning.planned_job import PlannedJob


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The event of a decision, its words, and the plan that takes over; None: the plan stays."""

    event: str
    words: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredChange:
    """A reason for which a run changes its plan at the end of a cycle; a method contributes it.

    Attributes:
        key: the key of run files with the steps between two decisions; 0 there turns it off.
        every: returns these steps of a plan; 0: never.
        decide: returns the decision from a job and its measured steps; None: there is nothing to tell.
        unmeasured: the event of a decision without records, which tells the `reason`.
        cycles: the measured cycles that it needs, without the first whole one, in which windows fill;
            0: any few steps will do.
    """

    key: str
    every: Callable[[Plan], int]
    decide: Callable[[PlannedJob, Timeline], Decision | None]
    unmeasured: str
    cycles: int = 0

    def first_step(self, begun: int, cycle: int) -> int:
        """Return the first step whose times count, of a plan that began behind `begun` steps."""
        return (-(-begun // cycle) + 1) * cycle if self.cycles else begun + 1


def changes_of(plan: Plan) -> tuple[MeasuredChange, ...]:
    """Return the changes that a run of a plan may make by itself.

    Raises:
        InputError: for wrong options of a method.
    """
    return tuple(one for one in parts(MeasuredChange) if one.every(plan))
