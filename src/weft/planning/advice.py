"""Advice on candidates: their standing against the best, and the one notch that makes a layout fit.

A notch is one move for less memory (`Purpose.SMALLER`). It halves the micro-batch, or doubles the tensor or
pipeline ranks at the cost of replicas. Or it adds recomputation, of all stages or of the first ones, or
sharding. Other packages may add moves. The smallest change is the fitting one with the shortest predicted
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.describe.layout import Layout
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.moves.move import Purpose
from weft.planning.neighbours import neighbours
from weft.planning.planners import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.problem import Problem
from weft.planning.ties import Standing, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestChange:
    """A change of one notch in words, such as ``recompute none -> selective``, and the layout it leads to."""

    words: str
    candidate: Candidate

    @property
    def step_s(self) -> float:
        """The predicted step of the changed layout, in seconds."""
        return self.candidate.step_s


class SmallestChanges:
    """Finds smallest changes in one problem; `known` are candidates without need of another simulation."""

    def __init__(self, problem: Problem, known: Iterable[Candidate] = ()) -> None:
        self._problem = problem
        self._bounds = Bounds(problem)
        self._judged = {one.words: one for one in known if one.plan is not None}

    def of_candidate(self, candidate: Candidate) -> SmallestChange | None:
        """Return the smallest change of a too big candidate; None for others, or without a layout."""
        too_big = candidate.verdict is Verdict.TOO_BIG and candidate.layout is not None
        return self.of(candidate.chain) if too_big else None

    def of(self, layout: Layout) -> SmallestChange | None:
        """Return the smallest change of a layout that does not fit; None where no notch is enough."""
        best: SmallestChange | None = None
        for bound_s, words, changed in sorted(self._possible(layout), key=lambda one: one[0]):
            if best is not None and bound_s >= best.step_s:
                break
            judged = self._judge(changed)
            if judged.verdict is Verdict.FITS and (best is None or judged.step_s < best.step_s):
                best = SmallestChange(words=words, candidate=judged)
        return best

    def _possible(self, layout: Layout) -> Iterator[tuple[float, str, Layout]]:
        """Yield legal notches that the bounds of memory let pass, with the lower bounds of their steps."""
        for one in neighbours(self._problem, layout, Purpose.SMALLER, self._bounds.layer_seconds):
            if one.unsaid is not None or refuse(self._problem.job, one.layout) is not None:
                continue
            try:
                bound_s = self._bounds.step_s(one.layout)
            except InputError:
                continue  # a profile was not measured there
            if self._bounds.may_fit(one.layout):
                yield bound_s, one.words, one.layout

    def _judge(self, layout: Layout) -> Candidate:
        key = str(layout)
        if key not in self._judged:
            asked = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
            self._judged[key] = simulated(self._problem, asked, self._bounds.layer_seconds(layout))
        return self._judged[key]


# More dots than this make a page slow, and show nothing more.
MOST_MAPPED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """A candidate, its standing against the best one, and the change that would make it fit.
    `smallest_change` is None where it fits, or no notch is enough."""

    candidate: Candidate
    standing: Standing
    smallest_change: SmallestChange | None


def advised(ranking: Ranking, top: int) -> tuple[Advised, ...]:
    """Return the first `top` candidates of a ranking with advice. This simulates, so it takes seconds."""
    changes = SmallestChanges(ranking.problem, ranking.candidates)
    return tuple(
        Advised(
            candidate=one,
            standing=standing(ranking, one),
            smallest_change=changes.of_candidate(one),
        )
        for one in ranking.candidates[:top]
    )


@dataclass(frozen=True, slots=True)
class Mapped:
    """A candidate, the peak of its fullest device and its step. Without a simulation these are lower bounds,
    or the planner's estimate of the step."""

    candidate: Candidate
    peak_bytes: int
    step_s: float

    @property
    def simulated(self) -> bool:
        return self.candidate.plan is not None


def mapped(ranking: Ranking, most: int = MOST_MAPPED) -> tuple[Mapped, ...]:
    """Return all simulated candidates, then those with the shortest bounds or estimates, `most` in all. A
    refused layout has neither step nor peak."""
    found = [
        Mapped(one, one.peak_bytes, one.prediction.step_s)
        for one in ranking.candidates
        if one.prediction is not None
    ]
    bounds = Bounds(ranking.problem)
    bounded = [
        one
        for one in ranking.candidates
        if one.plan is None
        and one.layout is not None
        and one.verdict is not Verdict.REFUSED
        and _least_s(one) > 0.0
    ]
    bounded.sort(key=_least_s)
    found += [
        Mapped(one, one.peak_bytes or bounds.holding(one.chain).total, _least_s(one))
        for one in bounded[: max(0, most - len(found))]
    ]
    return tuple(found)


def _least_s(candidate: Candidate) -> float:
    """Return the bound of a candidate's step, or its planner's estimate; 0 where there is neither."""
    return candidate.bound_s or candidate.estimate_s or 0.0
