"""The `weft` planner: the best layout that weft can find, on equal and on unlike devices.

It begins with the plan of Megatron-LM's rules, a first answer. On equal devices it takes over the search of
`homogeneous`. On unlike ones it gives every degree stages, shares and places that suit the devices and fit.
It simulates the layouts with the least estimates, and adds the best plans of the baselines. For layers that
form no chain, these include stages that form a graph. Then it changes the fastest little by little while that
helps. The simulator decides: no baseline in the search has a plan
with a shorter predicted step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from weft.describe.layout import Layout
from weft.describe.loss_choice import ANY_LOSS
from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.moves.move import Purpose
from weft.planning.goals import goal_of_step
from weft.planning.neighbours import neighbours
from weft.planning.planners.amp import AmpPlanner
from weft.planning.planners.baechi import BAECHI_PLANNER
from weft.planning.planners.base import Candidate, Planner, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.graphpipe import GraphPipePlanner
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.planners.megatron import MegatronPlanner
from weft.planning.planners.metis_form import MetisFormPlanner
from weft.planning.planners.part_clusters import problems_of, unlike_devices
from weft.planning.planners.simulated import (
    estimated,
    judged,
    prepare,
    simulated,
    states_too_big,
)
from weft.planning.planners.space import MAX_LOOPS, by_count, in_chunks, layouts
from weft.planning.planners.weft.degrees import DegreeSpace
from weft.planning.planners.weft.findings import NEAR, Findings
from weft.planning.planners.weft.mixed import MixedSpace, choices
from weft.planning.planners.weft.uneven import Suited, UnevenSpace
from weft.planning.planners.weft.unlike_replicas import ReplicaSpace
from weft.planning.planners.weft.unlike_space import DegreePlan, in_orders
from weft.planning.problem import Problem
from weft.progress import CountedWork, ProgressReport, unwatched


@dataclass(frozen=True, slots=True, kw_only=True)
class WeftPlanner:
    """The default planner; see the module.

    Attributes:
        finalists: layouts on unlike devices to simulate because of their estimates, until this many fit with
            one stage per device, and with several.
        orders: orders of the groups of nodes to try for the best degrees.
        trials: most small changes to simulate.
        chunked: most layouts to simulate with a chunked loss where memory is short.
        mixed: most layouts with different recomputation per stage to simulate, on unlike devices with one
            stage per device, and with several.
        degrees: most plans with unlike tensor degrees to simulate, on unlike devices.
        seeded_to: most devices for which the baselines run too; on more they take minutes.
        budget_s: seconds until the best so far is the answer; None: no limit.
        tell: receives the best so far, in words.
        report: gets the progress of the search over equal devices, and of changes of its best layouts.
    """

    name: ClassVar[str] = "weft"
    finalists: int = 12
    orders: int = 24
    trials: int = 60
    chunked: int = 12
    mixed: int = 8
    degrees: int = 8
    seeded_to: int = 32
    budget_s: float | None = None
    tell: Callable[[str], None] = lambda text: None
    report: ProgressReport = unwatched

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees and choices; on unlike devices the search adds stages, shares and places."""
        return layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Find the best layouts within the budget.

        Raises:
            InputError: when a pin names an unknown schedule.
        """
        if problem.minimise == "memory":
            return HomogeneousPlanner(report=self.report).search(problem)
        search = _Search(self, problem)
        # One plan is simulated sooner than the compiled simulator is loaded.
        rules = search.begin()
        prepare(problem)
        if unlike_devices(problem.job.cluster):
            search.estimate()
        else:
            search.take_all(HomogeneousPlanner(report=self.report).search(problem))
        search.seed(rules)
        search.chunk()
        search.take_unlike_degrees()
        for start in search.found.leaders():
            search.improve(start)
        for start in search.mix():
            search.improve(start)
        return search.found.ranking()


# Sharding for the rules of thumb where they alone do not fit, the fewest exchanges first, and the order for
# several stages per device: a device then recomputes, or gathers weights for, fewer layers at once.
_LIGHTER: tuple[tuple[Sharding, str | None], ...] = (
    ("zero-1", None),
    ("zero-1", "depth-first"),
    ("zero-3", "depth-first"),
)
# Most layouts to simulate for a first answer.
_FIRST_TRIALS = 4
# Plans of the first devices that are alike, to simulate again on the problem.
_ALIKE_TAKEN = 3
# Rounds of more recomputation for a layout that the simulator finds too big.
_FITTINGS = 3
# Orders of stages that form a graph, and levels of sharding, to try on the best partitions.
_ORDERS_OF_GRAPHS: tuple[tuple[str, Sharding], ...] = (
    *GraphPipePlanner().orders,
    ("graph-1f1b", "zero-1"),
    ("graph-zb-h1", "zero-1"),
    ("zb-h1", "zero-1"),
)
# Layouts to give different recomputation per stage, as a multiple of those to simulate.
_SUITED = 3


class _Search:
    """One search: its findings so far, and the time left."""

    def __init__(self, planner: WeftPlanner, problem: Problem) -> None:
        self._planner, self._problem = planner, problem
        self._unlike = unlike_devices(problem.job.cluster)
        self._bounds = Bounds(problem)
        self._space = MixedSpace(problem, self._bounds)
        self.found = Findings(problem, planner.tell)
        self._end_s = time.monotonic() + planner.budget_s if planner.budget_s is not None else float("inf")

    def begin(self) -> Sequence[Candidate]:
        """Take the plan of the rules of thumb, a first answer within a second.

        Where none of them fits, they are tried with less memory.
        Returns all candidates of the rules.
        """
        rules = MegatronPlanner()
        candidates = self._simulated_by(rules)
        best = next((one for one in candidates if one.verdict is Verdict.FITS), None)
        if best is not None:
            self.found.take(best)
        else:
            self._begin_lighter(rules)
        return candidates

    def _begin_lighter(self, rules: MegatronPlanner) -> None:
        """Try degrees in the order of the rules until one fits that shares states and recomputes layers."""
        tried = 0
        for sharding, looped in _LIGHTER:
            degrees: set[tuple[int, int]] = set()
            for layout in rules.space(self._problem):
                lighter = _lighter(self._problem, layout, sharding, looped)
                # The least micro-batch comes first, and needs the least memory.
                if (layout.pp, layout.tp) in degrees or not self._problem.admits(lighter):
                    continue
                degrees.add((layout.pp, layout.tp))
                if self._worth_trying(lighter):
                    tried += 1
                    if self._try(lighter).verdict is Verdict.FITS or tried == _FIRST_TRIALS:
                        return

    def _simulated_by(self, baseline: Planner) -> list[Candidate]:
        """Return the candidates that a baseline has simulated; none for pins that it cannot honour."""
        try:
            candidates = baseline.search(self._problem).candidates
        except InputError:
            return []
        # Here the simulator ranks, and a baseline's own estimate says nothing.
        return [replace(one, estimate_s=None) for one in candidates if one.plan is not None]

    def estimate(self) -> None:
        """Simulate the layouts with the least estimates; the first of them even without time left."""
        suited: list[Suited] = []
        for problem in problems_of(self._problem):
            bounds = self._bounds if problem is self._problem else Bounds(problem)
            found, refused = UnevenSpace(problem, bounds).search(
                self._planner.orders, self._planner.finalists
            )
            suited += found
            self.found.left_out += refused
        suited.sort(key=lambda one: goal_of_step(self._problem, one.estimate_s, one.layout.ranks))
        fitting = dict.fromkeys(self.found.kinds, 0)
        for one in suited:
            kind = self.found.kind(one.layout)
            late = self._late() and any(fitting.values())
            if fitting[kind] >= self._planner.finalists or late:
                self.found.left_out.append(estimated(one.layout, one.estimate_s))
                continue
            fitting[kind] += self._try(one.layout).verdict is Verdict.FITS

    def seed(self, rules: Sequence[Candidate]) -> None:
        """Take over the plans of the baselines, and plans of the first devices that are alike.

        `rules` are the candidates of the rules of thumb.
        """
        if self._unlike or self._problem.minimise == "cost":
            self._seed_alike()
        if self._problem.job.cluster.ranks > self._planner.seeded_to:
            return
        baselines: list[Planner] = [MetisFormPlanner(), AmpPlanner()]
        if not self._problem.job.graph.is_chain:
            baselines = [GraphPipePlanner(orders=_ORDERS_OF_GRAPHS), BAECHI_PLANNER, *baselines]
        for baseline in baselines:
            if self._late():
                return
            for candidate in self._simulated_by(baseline):
                self.found.take(candidate)
        for candidate in rules:
            self.found.take(candidate)

    def chunk(self) -> None:
        """Chunk the loss of layouts that are too big with all logits, and would win if they fit."""
        if self._problem.pins.loss not in (None, ANY_LOSS):
            return
        left = self._planner.chunked
        for too_big in self.found.too_big():
            layout = in_chunks(self._problem, too_big.chain)
            if not left or not self._goes_on() or not self.found.may_win(too_big.bound_s, layout):
                return
            if self.found.of(layout) is None and self._worth_trying(layout):
                self._try(layout)
                left -= 1

    def take_unlike_degrees(self) -> None:
        """Simulate the plans with unlike tensor degrees that may win by their estimates.

        Either stages or replicas have degrees of their own.
        """
        for space in (DegreeSpace, ReplicaSpace) if self._unlike else ():
            try:
                found = space(self._problem, self._bounds).search()
            except InputError:
                continue  # a profile was not measured at some degree
            self._take(found[: self._planner.degrees])

    def _take(self, found: Iterable[DegreePlan]) -> None:
        unjudged = Candidate(verdict=Verdict.PRUNED, reason="")
        for one in found:
            goal = goal_of_step(self._problem, one.estimate_s, one.plan.ranks)
            # An order with split passes may be faster than the estimated one.
            if not self._goes_on() or not self.found.wins(goal / NEAR):
                return
            for plan in in_orders(self._problem, one.plan):
                if self.found.take(judged(self._problem, unjudged, plan)).verdict is Verdict.REFUSED:
                    # The job's methods refuse all of these plans.
                    return

    def take_all(self, ranking: Ranking) -> None:
        """Take over all candidates of another search."""
        for candidate in ranking.candidates:
            if candidate.plan is not None:
                self.found.take(candidate)
            else:
                self.found.left_out.append(candidate)

    def _seed_alike(self) -> None:
        """Search orders with several stages per device where devices are alike, and take over the best."""
        for problem in problems_of(self._problem):
            if self._late():
                return
            if problem is not self._problem and not unlike_devices(problem.job.cluster):
                for candidate in HomogeneousPlanner().search(problem).fitting[:_ALIKE_TAKEN]:
                    self._try(candidate.chain)

    def improve(self, start: Candidate) -> None:
        """Change a layout little by little, while that helps and time is left."""
        current: Candidate | None = start
        trials = self._planner.trials
        counted = CountedWork(self._planner.report, "improving", trials, "changes")
        while current is not None:
            faster = None
            for layout in self._neighbours(current):
                if trials == 0 or self._late():
                    return
                if self.found.of(layout) is not None or not self._worth_trying(layout):
                    continue
                trials -= 1
                judged = self._try(layout)
                counted.finish()
                if judged.verdict is Verdict.FITS and self.found.better(judged, current):
                    faster = judged
                    break
            current = faster

    def _neighbours(self, current: Candidate) -> Iterator[Layout]:
        """Yield small changes of a candidate; pinned choices stay. Where stages recompute differently, a
        moved layer can change the recomputation that they need."""
        layout = current.chain
        for one in neighbours(self._problem, layout, Purpose.FASTER, self._bounds.layer_seconds):
            if one.unsaid is not None:
                refused = Candidate(layout=layout, verdict=Verdict.REFUSED, reason=one.unsaid)
                self.found.unsaid[one.move.name] = refused
            elif self._problem.admits(one.layout):
                yield one.layout
                if one.layout.layers_per_stage != layout.layers_per_stage and layout.recompute_per_stage:
                    again = self._space.lightest(one.layout)
                    if again is not None:
                        yield again

    def mix(self) -> list[Candidate]:
        """Let stages recompute differently where that may win; return the fastest per kind near the best."""
        if not self._planner.mixed or not choices(self._problem) or not self._goes_on():
            return []
        fitting: list[Candidate] = []
        left = dict.fromkeys(self.found.kinds, self._planner.mixed)
        for layout in self._mixed():
            if not any(left.values()) or not self._goes_on():
                break
            kind = self.found.kind(layout)
            if left[kind] and self._may_win(layout):
                known = len(self.found)
                judged = self._fitted(layout)
                left[kind] -= len(self.found) > known
                fitting += [judged] if judged is not None else []
        return self.found.near(fitting)

    def _goes_on(self) -> bool:
        """Return True if nothing fits yet, or time is left."""
        return self.found.best is None or not self._late()

    def _mixed(self) -> Iterator[Layout]:
        """Yield layouts with different recomputation per stage, the most promising first."""
        if not self._unlike:
            yield from self._space.on_equal_devices(lambda one: self._goes_on() and self._may_win(one))
            return
        found: list[Suited] = []
        for problem in problems_of(self._problem):
            bounds = self._bounds if problem is self._problem else Bounds(problem)
            found += MixedSpace(problem, bounds).on_unlike_devices(
                lambda step_s, one: self._goes_on() and self.found.may_win(step_s, one),
                _SUITED * self._planner.mixed,
            )
        found.sort(key=lambda one: goal_of_step(self._problem, one.estimate_s, one.layout.ranks))
        yield from (one.layout for one in found)

    def _may_win(self, layout: Layout) -> bool:
        """Return True if the lower bound of a layout's step is below the best one."""
        return self.found.may_win(self._bounds.step_s(layout), layout)

    def _worth_trying(self, layout: Layout) -> bool:
        """Return True if a layout is legal and may win and fit by its bounds."""
        if refuse(self._problem.job, layout) is not None:
            return False
        try:
            if states_too_big(layout, self._bounds) is not None:
                return False
            return self._may_win(layout) and self._space.may_fit(layout)
        except InputError:
            return True  # a profile was not measured there; the simulator says so

    def _fitted(self, layout: Layout) -> Candidate | None:
        """Simulate a layout, with more recomputation where it is too big; return None where none fits. Alike
        and balanced stages were judged before, or cannot win."""
        alike = layout.recompute_per_stage is None and layout.layers_per_stage is None
        if alike and self.found.of(layout) is None:
            return None
        for _ in range(_FITTINGS):
            judged = self.found.of(layout) or self._try(layout)
            heavier = self._space.with_more(judged) if judged.verdict is Verdict.TOO_BIG else None
            if heavier is None:
                break
            layout = heavier
        return judged if judged.verdict is Verdict.FITS else None

    def _late(self) -> bool:
        return time.monotonic() >= self._end_s

    def _try(self, layout: Layout) -> Candidate:
        candidate = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
        try:
            judged = simulated(self._problem, candidate, self._bounds.layer_seconds(layout))
        except InputError as error:
            judged = replace(candidate, verdict=Verdict.REFUSED, reason=str(error.violations[0]))
        return self.found.take(judged)


def _lighter(problem: Problem, layout: Layout, sharding: Sharding, looped: str | None) -> Layout:
    """Return a layout with sharding and recomputation, in an order of several stages per device if asked."""
    if looped is not None:
        loops = max(1, min(MAX_LOOPS, len(problem.job.graph.layers) // layout.pp))
        layout = by_count(problem, replace(layout, schedule=looped, loops=loops, layers_per_stage=None))
    return replace(layout, sharding=sharding if layout.dp > 1 else "zero-0").recomputing("full")
