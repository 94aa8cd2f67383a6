"""What planners share: candidates, rankings and the protocol of a planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.planning.problem import Problem


class Verdict(StrEnum):
    """What became of a candidate."""

    FITS = "fits"
    TOO_BIG = "too big"
    PRUNED = "pruned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout a planner looked at.

    `plan` carries its prediction when the layout was simulated. `bound_s` is a lower bound of the step time
    (0 when none was computed), `peak_bytes` the largest rank's peak (0 when unknown). `estimate_s` is what
    the planner's own model says of the step, None where that is the simulator. `reason` says in words why the
    verdict was given.
    """

    layout: Layout
    verdict: Verdict
    reason: str
    bound_s: float = 0.0
    peak_bytes: int = 0
    estimate_s: float | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All candidates of one search, best first; those that were simulated come before those that were not.

    Best is what the planner says: a candidate's `estimate_s` where it has one, else its predicted step.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]

    @property
    def fitting(self) -> Sequence[Candidate]:
        return [candidate for candidate in self.candidates if candidate.verdict is Verdict.FITS]


class Planner(Protocol):
    """A search over layouts. `name` is what users type."""

    name: ClassVar[str]

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Every layout the planner would consider, legal or not."""
        ...

    def search(self, problem: Problem) -> Ranking:
        """Judge the space and rank it."""
        ...
