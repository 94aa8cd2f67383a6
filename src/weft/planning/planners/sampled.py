"""Planners that simulate layouts of the homogeneous space one by one: `exhaustive` all, `random` some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from weft.describe.layout import Layout
from weft.errors import InputError, Violation
from weft.moves.layout import refuse
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.simulated import simulated
from weft.planning.planners.space import layouts
from weft.planning.problem import Problem


@dataclass(frozen=True, slots=True)
class ExhaustivePlanner:
    """The search that simulates every layout, `limit` of them at most."""

    name: ClassVar[str] = "exhaustive"
    limit: int = 2000

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `weft.planning.planners.space.layouts`."""
        return layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Simulate the whole space.

        Raises:
            InputError: when it has more layouts than the limit, or a pin names an unknown schedule.
        """
        count = sum(1 for _ in self.space(problem))
        if count > self.limit:
            text = f"exhaustive simulates {self.limit} layouts at most, here are {count}; pin more"
            raise InputError(Violation("planner", text, "homogeneous"))
        return _ranked(problem, self.space(problem))


@dataclass(frozen=True, slots=True)
class RandomPlanner:
    """The search that simulates `trials` runnable layouts, drawn by `seed` without replacement."""

    name: ClassVar[str] = "random"
    seed: int = 0
    trials: int = 64

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `weft.planning.planners.space.layouts`."""
        return layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Simulate the drawn layouts.

        Raises:
            InputError: when a pin names an unknown schedule.
        """
        every = list(self.space(problem))
        # Layout k has the k-th number of the seed's stream, independent of the start of the draw.
        numbers = np.random.Generator(np.random.Philox(key=self.seed)).random(len(every))
        drawn = [every[place] for place in np.argsort(numbers)]
        legal = [layout for layout in drawn if refuse(problem.job, layout) is None]
        # Where no layout can run the job, the reasons are the answer.
        return _ranked(problem, (legal or drawn)[: self.trials])


def _ranked(problem: Problem, chosen: Iterable[Layout]) -> Ranking:
    bounds = Bounds(problem)
    judged = sorted((_judged(problem, layout, bounds) for layout in chosen), key=rank_key(problem))
    return Ranking(problem=problem, candidates=tuple(judged))


def _judged(problem: Problem, layout: Layout, bounds: Bounds) -> Candidate:
    candidate = Candidate(layout=layout, verdict=Verdict.REFUSED, reason=refuse(problem.job, layout) or "")
    if candidate.reason:
        return candidate
    try:
        layer_seconds = bounds.layer_seconds(layout)
    except InputError as error:
        # A profile without this micro-batch size refuses to guess.
        return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=str(error.violations[0]))
    return simulated(problem, candidate, layer_seconds)
