"""The `homogeneous` planner: layouts of equal replicas, each a pipeline of equal tensor groups.

A closed form bounds the time or the memory of each layout from below. An `Elimination` simulates layouts,
least bounds first, until no other layout can be among the best `finalists`. Every layout gets an answer. It
fits, is too big (by how much, and with what), is pruned (by which bound) or is refused (why).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from weft.describe.layout import Layout
from weft.errors import InputError, Violation
from weft.moves.layout import refuse
from weft.planning.goals import cost_of
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.elimination import Elimination
from weft.planning.planners.simulated import prepare, simulated, states_too_big
from weft.planning.planners.space import by_count, degree_layouts, layouts, require_closed_form
from weft.planning.problem import Problem
from weft.progress import CountedWork, ProgressReport, WorkDone, unwatched


class _OfEveryLayout:
    """A planner that considers every homogeneous layout."""

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `weft.planning.planners.space.layouts`."""
        return layouts(problem)


@dataclass(frozen=True)
class HomogeneousPlanner(_OfEveryLayout):
    """A search over homogeneous layouts.

    Attributes:
        finalists: the least number of fitting layouts to simulate.
        report: gets the number of layouts with a bound, of all, then of those decided, of those in doubt.
    """

    name: ClassVar[str] = "homogeneous"
    finalists: int = 8
    report: ProgressReport = unwatched

    def search(self, problem: Problem) -> Ranking:
        """Judge every layout of the space; see the module's docstring.

        Raises:
            InputError: when a pin names an unknown schedule.
        """
        prepare(problem)
        judged: list[Candidate] = []
        waiting: list[Candidate] = []
        bounds = Bounds(problem)
        space = [*self.space(problem)]
        for layout in CountedWork(self.report, "bounded", len(space), "layouts").each(space):
            answer = _first_look(problem, layout, bounds)
            (waiting if answer.verdict is Verdict.PRUNED else judged).append(answer)
        elimination = Elimination(problem, bounds, self.finalists)
        leasts = sorted(elimination.least(one) for one in waiting)
        for done, answer in enumerate(elimination.decided(waiting), 1):
            judged.append(answer)
            if answer.verdict is not Verdict.PRUNED and (worst := elimination.worst) < inf:
                # Layouts with a higher bound will be pruned at once.
                self.report(WorkDone("decided", done, max(done, bisect_right(leasts, worst)), "layouts"))
        return Ranking(problem=problem, candidates=tuple(sorted(judged, key=rank_key(problem))))


def _first_look(problem: Problem, layout: Layout, bounds: Bounds) -> Candidate:
    """Refuse a layout, find its states too big, or keep it for simulation (`PRUNED` until then)."""
    reason = refuse(problem.job, layout)
    if reason is not None:
        return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason)
    try:
        bound_s = bounds.step_s(layout)
    except InputError as error:
        # A profile without this micro-batch size refuses to guess.
        return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=str(error.violations[0]))
    reason = states_too_big(layout, bounds)
    if reason is not None:
        return Candidate(layout=layout, verdict=Verdict.TOO_BIG, reason=reason, bound_s=bound_s)
    return Candidate(layout=layout, verdict=Verdict.PRUNED, reason="", bound_s=bound_s)


def rank_key(problem: Problem) -> Callable[[Candidate], tuple[float, ...]]:
    """Return a sort key: by verdict, then by the quantity that the problem minimises."""
    order = {Verdict.FITS: 0, Verdict.TOO_BIG: 1, Verdict.PRUNED: 2, Verdict.REFUSED: 3}

    def key(candidate: Candidate) -> tuple[float, ...]:
        step_s = candidate.bound_s if candidate.prediction is None else candidate.prediction.step_s
        first: float = candidate.peak_bytes if problem.minimise == "memory" else 0
        if problem.minimise == "cost" and candidate.plan is not None:
            first = cost_of(problem.job.cluster, step_s, candidate.plan.ranks)
        return (order[candidate.verdict], first, step_s, candidate.peak_bytes)

    return key


@dataclass(frozen=True)
class UniformPlanner(HomogeneousPlanner):
    """The homogeneous planner's search, over degrees alone and without balancing."""

    name: ClassVar[str] = "uniform"

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `degree_layouts`."""
        return (by_count(problem, layout) for layout in degree_layouts(problem))

    def search(self, problem: Problem) -> Ranking:
        """Simulate all layouts that no bound rules out.

        Raises:
            InputError: for pins that it does not know.
        """
        require_closed_form(problem, self.name)
        return super().search(problem)


@dataclass(frozen=True)
class ExhaustivePlanner(_OfEveryLayout):
    """The search that simulates every layout, `limit` of them at most."""

    name: ClassVar[str] = "exhaustive"
    limit: int = 2000

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


@dataclass(frozen=True)
class RandomPlanner(_OfEveryLayout):
    """The search that simulates `trials` runnable layouts, drawn by `seed` without replacement."""

    name: ClassVar[str] = "random"
    seed: int = 0
    trials: int = 64

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
