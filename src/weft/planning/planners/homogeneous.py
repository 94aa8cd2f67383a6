"""The `homogeneous` planner: layouts of equal replicas, each a pipeline of equal tensor groups.

A closed form bounds the time or the memory of each layout from below. The search simulates layouts in the
order of this bound, until no other layout can be among the best `finalists`. Every layout gets an answer. It
fits, is too big (by how much, and with what), is pruned (by which bound) or is refused (why).

When time is minimised, a fitting layout dominates variants that cannot be faster. A variant with more
sharding gathers and reduces at least as many bytes at least as often. Recomputing adds a pass. This does not
hold from zero-0 to zero-1. There, weights may be smaller than the gradients that they replace in the
exchange, and replicas step only their share. Nor does it hold between some kinds of sharding groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from typing import ClassVar

import numpy as np

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES, shared_out
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.moves.layout import refuse
from weft.planning.goals import cost_of
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import COMPILED_AFTER_LAYOUTS, prepare, simulated, too_big
from weft.planning.planners.space import by_count, degree_layouts, layouts, require_closed_form
from weft.planning.problem import Problem
from weft.predict.engine import load_compiled_engine
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
        waiting: list[tuple[float, Candidate]] = []
        bounds, memory = Bounds(problem), problem.minimise == "memory"
        space = [*self.space(problem)]
        for layout in CountedWork(self.report, "bounded", len(space), "layouts").each(space):
            answer = _first_look(problem, layout, bounds)
            if answer.verdict is Verdict.PRUNED:
                least = float(bounds.holding(answer.chain).total) if memory else answer.bound_s
                waiting.append((least, answer))
            else:
                judged.append(answer)
        waiting.sort(key=_preference)
        reached: list[float] = []
        tried = 0
        variants: dict[tuple[str, tuple[int, ...] | None], list[Layout]] = defaultdict(list)
        for place, (least, candidate) in enumerate(waiting):
            plain = replace(candidate.chain, sharding="zero-0").recomputing("none")
            # The words for an order of devices may be cut.
            family = str(plain), plain.rank_order
            worst = _worst(reached, self.finalists)
            reason = _cannot_win(problem, candidate, least, worst, variants[family])
            if reason is not None:
                judged.append(replace(candidate, reason=reason))
                continue
            tried += 1
            if tried == COMPILED_AFTER_LAYOUTS:
                load_compiled_engine()
            answered = too_big(candidate, bounds) or simulated(
                problem, candidate, bounds.layer_seconds(candidate.chain)
            )
            if answered.verdict is Verdict.FITS:
                reached.append(float(answered.peak_bytes) if memory else answered.step_s)
                variants[family].append(answered.chain)
            judged.append(answered)
            if (worst := _worst(reached, self.finalists)) < inf:
                # Layouts with a higher bound will be pruned at once.
                most = max(place + 1, bisect_right(waiting, worst, key=itemgetter(0)))
                self.report(WorkDone("decided", place + 1, most, "layouts"))
        return Ranking(problem=problem, candidates=tuple(sorted(judged, key=rank_key(problem))))


def _worst(reached: Sequence[float], finalists: int) -> float:
    """Return the worst of the best so many fitting layouts; infinite before there are as many."""
    return sorted(reached)[finalists - 1] if len(reached) >= finalists else inf


def _cannot_win(
    problem: Problem, candidate: Candidate, least: float, worst: float, fitting: list[Layout]
) -> str | None:
    """Return the reason why a candidate cannot be among the best; `fitting` are variants of its layout."""
    if least > worst and problem.minimise == "memory":
        return f"cannot hold less than {format_bytes(round(worst))}: at least {format_bytes(round(least))}"
    if least > worst:
        return f"cannot beat {format_seconds(worst)}: at least {format_seconds(least)}"
    if problem.minimise == "time":
        for other in fitting:
            if _dominates(other, candidate.chain):
                short = f"{shared_out(other)}, recompute {other.recompute_text}"
                return f"cannot beat the same layout with {short}, which fits"
    return None


def _dominates(layout: Layout, variant: Layout) -> bool:
    """Return True if a variant of a fitting layout cannot be faster; see the module's docstring."""
    if RECOMPUTES.index(layout.recompute) > RECOMPUTES.index(variant.recompute):
        return False
    if layout.sharding == "zero-0":
        return variant.sharding == "zero-0"
    return layout.sharding <= variant.sharding


def _preference(entry: tuple[float, Candidate]) -> tuple[float, float, str, str]:
    """Order by the least bound, then the shortest step, then the least sharding."""
    least, candidate = entry
    return (least, candidate.bound_s, candidate.chain.sharding, str(candidate.chain))


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
    over = bounds.resident_bytes(layout) - bounds.largest_memory_bytes
    if over > 0:
        reason = f"states and buffers alone need {format_bytes(over)} more than any device has"
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
