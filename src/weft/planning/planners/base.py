"""The shared parts of planners: candidates, rankings and the protocol of a planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from weft.describe.layout import Layout
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.prediction import Prediction
from weft.describe.units import format_seconds
from weft.planning.problem import Problem


class Verdict(StrEnum):
    """The result of judging a candidate."""

    FITS = "fits"
    TOO_BIG = "too big"
    PRUNED = "pruned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan a planner looked at.

    `layout` is its short form; None if only `plan` expresses it. `plan` and `prediction` are the simulator's
    input and output, None if it did not run. `bound_s` is a lower bound of the step time, 0 if none was
    computed. `peak_bytes` is the largest rank's peak, 0 if unknown. `estimate_s` is the step time by the
    planner's own model, None if that model is the simulator. `reason` gives the verdict's reason in words.
    """

    layout: Layout | None = None
    verdict: Verdict
    reason: str
    bound_s: float = 0.0
    peak_bytes: int = 0
    estimate_s: float | None = None
    plan: Plan | None = None
    prediction: Prediction | None = None

    @property
    def chain(self) -> Layout:
        """The layout, for searches among layouts."""
        assert self.layout is not None, "a search over layouts makes candidates of layouts"
        return self.layout

    @property
    def words(self) -> str:
        """The candidate's text, for tables and messages."""
        if self.layout is not None:
            return str(self.layout)
        return "no layout" if self.plan is None else self.plan.words

    @property
    def step_s(self) -> float:
        """The predicted step of a simulated candidate, in seconds."""
        assert self.prediction is not None, "only simulated candidates have a predicted step"
        return self.prediction.step_s

    def __repr__(self) -> str:
        why = self.reason if self.prediction is None else f"step {format_seconds(self.step_s)}"
        return one_line(self, f"{self.verdict}: {why}; {self.words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All candidates of one search, best first; simulated ones come before the others.

    The planner decides the order: by `estimate_s` if candidates have one, else by the simulator's prediction.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        best = f", first {self.candidates[0].layout}" if self.candidates else ""
        return one_line(self, f"of {len(self.candidates)} layouts, {len(self.fitting)} fitting{best}")

    @property
    def fitting(self) -> Sequence[Candidate]:
        return [candidate for candidate in self.candidates if candidate.verdict is Verdict.FITS]


class Planner(Protocol):
    """A search over layouts; users type its `name`."""

    name: ClassVar[str]

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return every layout that the planner considers, legal or not."""
        ...

    def search(self, problem: Problem) -> Ranking:
        """Judge the layouts of the space and rank them."""
        ...
