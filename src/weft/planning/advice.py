"""Advice on the shown candidates, in addition to the planner's own words."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planning.planners import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.smallest_change import SmallestChange, SmallestChanges
from weft.planning.ties import Standing, standing

# More dots than this make a page slow, and show nothing more.
MOST_MAPPED = 3000


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
