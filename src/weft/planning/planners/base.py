"""The common parts of planners: candidates, rankings and the protocol of a planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from weft.describe.layout import Layout
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.prediction import Prediction
from weft.describe.units import format_seconds
from weft.planning.problem import Problem


class Verdict(StrEnum):
    """The result for a candidate."""

    FITS = "fits"
    TOO_BIG = "too big"
    PRUNED = "pruned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan that a planner considered.

    Attributes:
        layout: the plan in short; None where no layout can express it.
        reason: the reason for the verdict, in words.
        bound_s: a lower bound of the step time (0 when none was computed).
        peak_bytes: the largest rank's peak (0 when unknown).
        estimate_s: the step by the planner's own model, None where that is the simulator.
        plan, prediction: the simulated plan and its prediction, None without a simulation.
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
        """The candidate in words, for tables and messages."""
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

    The planner decides the order: by a candidate's `estimate_s` if it has one, else by its predicted step.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        best = f", first {self.candidates[0].layout}" if self.candidates else ""
        return one_line(self, f"of {len(self.candidates)} layouts, {len(self.fitting)} fitting{best}")

    @property
    def fitting(self) -> Sequence[Candidate]:
        return [candidate for candidate in self.candidates if candidate.verdict is Verdict.FITS]

    @property
    def closest(self) -> Sequence[Candidate]:
        """The candidates that do not fit: the lowest peak first, and those with unknown peaks last.

        Of these, the ones come first that only their program refuses: rules for layouts admit them.
        """
        others = (one for one in self.candidates if one.verdict is not Verdict.FITS)
        return sorted(others, key=lambda one: (one.peak_bytes == 0, one.peak_bytes, not one.bound_s))


class Planner(Protocol):
    """A search over layouts. Users type its `name`."""

    @property
    def name(self) -> str:
        """The word of `--planner`."""
        ...

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return every layout that the planner would consider, legal or not."""
        ...

    def search(self, problem: Problem) -> Ranking:
        """Judge the space and rank it."""
        ...
