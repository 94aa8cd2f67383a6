"""The `graphpipe` planner: stages that form a graph, beside the best stages in a row (arXiv 2406.17145).

It partitions the series-parallel tree of the layers for every size of micro-batches. Either all stages have
equally many replicas, or each has a number of its own. It also partitions the layers as a chain. A chain has
their own order, or the order in which they may end. Its stages may have layers of several branches. On unlike
devices, one more search knows the times and the memory of each kind. The simulator ranks the partitions with
the least estimates. So the answer is the better one of graph and chain, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from weft.describe.layout import Layout
from weft.describe.plan import Choice, Sharding
from weft.describe.units import format_seconds
from weft.moves.layout import refuse
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.graphpipe.part_plans import MOST_KINDS
from weft.planning.planners.graphpipe.partition_search import PartitionSearch
from weft.planning.planners.graphpipe.plans import (
    CHAIN_SCHEDULE,
    SPLIT_CHAIN_SCHEDULE,
    SPLIT_SCHEDULE,
    depth_of,
)
from weft.planning.planners.graphpipe.questions import (
    degrees_of,
    least_layout,
    partition_layouts,
    require_partition,
)
from weft.planning.planners.graphpipe.unlike_devices import by_work, levelled
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.part_clusters import kinds_of, problems_of, unlike_devices
from weft.planning.planners.simulated import judged_plan, prepare
from weft.planning.planners.space import overlaps
from weft.planning.problem import Problem
from weft.program.schedules import get_schedule
from weft.program.schedules.base import is_for_graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPipePlanner:
    """A search over partitions of the graph of layers.

    Attributes:
        finalists: partitions of the graph, and of the layers as chains, to simulate, least estimates first.
        tolerance: relative distance from the best partition at which a search ends.
        orders: further orders and shardings to try on the best partitions, where they are not pinned. 1f1b
            keeps a micro-batch for every stage, not only for those on a path, so messages delay it less.
            Orders with backwards in two parts wait less at forks and joins.
        nearness: the longest step of a pipeline that is tried in these, over that of the fastest one.
        most_whole: the most stages of a plan that are tried with whole backwards, one after the other.
        most_kinds: the most kinds of devices that a search tells apart, up to 3; with 1 none does.
        kind_finalists: partitions of that search to simulate. Its estimates know no links between kinds.
    """

    name: ClassVar[str] = "graphpipe"
    finalists: int = 4
    tolerance: float = 2e-2
    orders: tuple[tuple[str, Sharding], ...] = (
        (CHAIN_SCHEDULE, "zero-0"),
        (SPLIT_SCHEDULE, "zero-0"),
        (SPLIT_CHAIN_SCHEDULE, "zero-0"),
    )
    nearness: float = 1.25
    most_whole: int = 32
    most_kinds: int = MOST_KINDS
    kind_finalists: int = 8

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees and sizes of micro-batches; partitions add the stages."""
        return partition_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Partition the layers as a graph and as a chain, and simulate the best partitions.

        Raises:
            InputError: for pins, goals and methods that a partition does not know.
        """
        require_partition(problem, self.name)
        least = least_layout(problem)
        if (reason := refuse(problem.job, least)) is not None:
            refused = Candidate(layout=least, verdict=Verdict.REFUSED, reason=reason)
            return Ranking(problem=problem, candidates=(refused,))
        prepare(problem)
        unlike = unlike_devices(problem.job.cluster)
        # The costs are those of the slowest devices, so plans without them may be better.
        parts = problems_of(problem) if unlike else (problem,)
        found = [one for part in parts if _has_room(part) for one in self._partitions(problem, part)]
        candidates = self._improved(problem, found)
        if unlike:
            # Beside the others, whose improvements depend on the best of them.
            candidates = [*candidates, *self._improved(problem, self._by_kind(problem))]
            candidates = sorted(_once(candidates), key=rank_key(problem))
        return Ranking(problem=problem, candidates=tuple(_told(problem, candidates)))

    def _improved(self, problem: Problem, found: Sequence[Candidate]) -> list[Candidate]:
        """Return partitions and changes of the best of them, the fastest first."""
        candidates = sorted(_once(found), key=rank_key(problem))
        if unlike_devices(problem.job.cluster):
            moved = [one for best in _pipelines(candidates) for one in self._by_speed(problem, best)]
            candidates = sorted(_once([*candidates, *moved]), key=rank_key(problem))
        pipelines = _pipelines(candidates)
        near = [one for one in pipelines if one.step_s <= self.nearness * pipelines[0].step_s]
        varied = [one for best in near for one in self._varied(problem, best)]
        candidates = sorted(_once([*candidates, *varied]), key=rank_key(problem))
        whole = self._partly_whole(problem, candidates)
        return sorted(_once([*candidates, *whole]), key=rank_key(problem))

    def _partitions(self, problem: Problem, part: Problem) -> list[Candidate]:
        """Return the best partitions on the first groups of a problem's nodes, simulated."""
        search = PartitionSearch(part, problem, self.tolerance)
        kinds = [search.chains] if problem.job.graph.is_chain else [[search.tree], search.chains]
        # Estimates of unlike numbers of replicas overlook more, so they would crowd out others.
        searches = [*map(search.alike, kinds), search.unlike(kinds[0])]
        found = [one for some in searches for one in search.simulated(some, self.finalists)]
        return [*found, *search.replicas()]

    def _by_kind(self, problem: Problem) -> list[Candidate]:
        """Return the best partitions with devices of one kind in each stage, simulated."""
        kinds = kinds_of(problem)
        if not 1 < len(kinds) <= self.most_kinds or not all(map(_has_room, kinds)):
            return []
        search = PartitionSearch(problem, problem, self.tolerance, kinds)
        trees = search.chains[:1] if problem.job.graph.is_chain else [search.tree]
        return search.simulated(search.alike(trees), self.kind_finalists)

    def _by_speed(self, problem: Problem, best: Candidate) -> Iterator[Candidate]:
        """Yield a simulated partition with most work on the fastest devices, and with layers moved there."""
        assert best.plan is not None, "a candidate that fits has a plan"
        dealt = by_work(problem, best.plan)
        for plan in (dealt, levelled(problem, dealt)):
            if plan != best.plan:
                yield judged_plan(problem, plan)

    def _varied(self, problem: Problem, best: Candidate) -> Iterator[Candidate]:
        """Yield a simulated partition in other orders and shardings."""
        pins, job, plan = problem.pins, problem.job, best.plan
        if plan is None:
            return
        # As in other searches, processors keep to the plainest orders.
        for name, sharding in self.orders if overlaps(job.cluster) else ():
            if job.graph.is_chain and is_for_graphs(get_schedule(name)):
                continue
            kept = pins.schedule is None and pins.sharding in (None, sharding)
            divides = job.optimizer.steps_shards and max(plan.replicas) > 1
            if kept and (sharding == "zero-0" or divides):
                schedule = plan.schedule.model_copy(update={"name": name})
                varied = plan.model_copy(update={"schedule": schedule, "sharding": sharding})
                yield judged_plan(problem, varied)

    def _partly_whole(self, problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the best plan of split backwards with those whole that make its step shorter, if any do."""
        best = next((one for one in candidates if one.verdict is Verdict.FITS), None)
        if best is None or best.plan is None or best.plan.schedule.name != SPLIT_SCHEDULE:
            return []
        chosen, stages = best, set[int]()
        for stage in range(len(best.plan.stages))[: self.most_whole]:
            options = {"whole": ",".join(map(str, sorted({*stages, stage})))}
            plan = best.plan.model_copy(update={"schedule": Choice(name=SPLIT_SCHEDULE, options=options)})
            tried = judged_plan(problem, plan)
            if tried.verdict is Verdict.FITS and tried.step_s < chosen.step_s:
                chosen, stages = tried, {*stages, stage}
        return [] if chosen is best else [chosen]


def _has_room(problem: Problem) -> bool:
    """Return True if a cluster has the devices that pinned degrees need."""
    return any(tp * dp <= problem.job.cluster.ranks for tp, dp in degrees_of(problem))


def _pipelines(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with several stages that fit."""
    fitting = [one for one in candidates if one.verdict is Verdict.FITS]
    return [one for one in fitting if one.plan is not None and len(one.plan.stages) > 1]


def _once(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates without repeated plans."""
    return list({one.plan.plan_id if one.plan else str(id(one)): one for one in candidates}.values())


def _told(problem: Problem, candidates: list[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates; the best one says why it wins over the best of the other kind."""
    fitting = [one for one in candidates if one.verdict is Verdict.FITS]
    for one in candidates:
        if fitting and one is fitting[0]:
            yield replace(one, reason=f"{one.reason}; {_why_first(problem, fitting)}")
        else:
            yield one


def _why_first(problem: Problem, fitting: list[Candidate]) -> str:
    best, depths = fitting[0], [_depth(problem, one) for one in fitting]
    stages = len(best.plan.stages) if best.plan else 0
    graph = depths[0] < stages
    words = f"a graph of {stages} stages, {depths[0]} on its longest path" if graph else "stages in a row"
    for one, depth in zip(fitting, depths, strict=True):
        if one.plan and (depth < len(one.plan.stages)) != graph:
            other = "stages in a row" if graph else "a graph of stages"
            return f"{words}; the best plan with {other} takes {format_seconds(one.step_s)}"
    return words


def _depth(problem: Problem, candidate: Candidate) -> int:
    assert candidate.plan is not None, "a fitting candidate was simulated"
    return depth_of(candidate.plan, problem.job.graph)
