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
from typing import ClassVar, NamedTuple

from weft.describe.layout import Layout
from weft.describe.plan import Choice, Sharding
from weft.describe.units import format_seconds
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.graph_costs import GraphCosts, graph_costs
from weft.planning.planners.graphpipe.part_plans import MOST_KINDS, StageGraph
from weft.planning.planners.graphpipe.partitioner import Partitioner
from weft.planning.planners.graphpipe.plans import (
    CHAIN_SCHEDULE,
    SPLIT_CHAIN_SCHEDULE,
    SPLIT_SCHEDULE,
    depth_of,
    edges_of,
    in_order,
    longest_path,
    plan_of,
)
from weft.planning.planners.graphpipe.questions import (
    degrees_of,
    least_layout,
    may_deal,
    partition_layouts,
    require_partition,
    sizes_of,
    unlike_degrees,
)
from weft.planning.planners.graphpipe.series_parallel import decompose, earliest_ends
from weft.planning.planners.graphpipe.trees import Tree, joined
from weft.planning.planners.graphpipe.unlike_devices import by_work, levelled
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.part_clusters import kinds_of, problems_of, unlike_devices
from weft.planning.planners.simulated import judged_plan, prepare
from weft.planning.planners.space import overlaps
from weft.planning.problem import Problem
from weft.program.schedules import get_schedule
from weft.program.schedules.base import is_for_graphs


class _Found(NamedTuple):
    """A partition with its estimated step, its longest path of stages, and the choices beside it."""

    estimate_s: float
    depth: int
    graph: StageGraph
    tp: int
    sharding: Sharding


class _Degrees(NamedTuple):
    """A search of one size of micro-batches, and the choices beside it.

    Stages have one degree of data parallelism, or choose from several.
    """

    partitioner: Partitioner
    tp: int
    sharding: Sharding


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
        search = _PartitionSearch(self, part, problem)
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
        search = _PartitionSearch(self, problem, problem, kinds)
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


class _PartitionSearch:
    """The partitions of one problem, which may be on a part of the nodes of the `whole` one.

    With `kinds`, the problem on the devices of each kind alone, stages have the costs of their own kind.
    """

    def __init__(
        self, planner: GraphPipePlanner, problem: Problem, whole: Problem, kinds: Sequence[Problem] = ()
    ) -> None:
        self._planner, self._problem, self._whole = planner, problem, whole
        self._kinds = kinds or [problem]
        self._costs: dict[tuple[int, Sharding, int], list[GraphCosts]] = {}
        layers = range(len(problem.job.graph.layers))
        first = self.costs_of(*next(degrees_of(problem)), "zero-0")[0]
        costs = next(iter(first.passes.values()))
        seconds = dict(enumerate((costs.forward_s + costs.backward_s).tolist()))
        self.tree = decompose(layers, problem.job.graph.edges, seconds).tree
        ends = earliest_ends(layers, problem.job.graph.edges, seconds)
        # In their own order, and side by side as branches run.
        orders = dict.fromkeys((tuple(layers), tuple(sorted(layers, key=ends.__getitem__))))
        self.chains = [joined("series", order) for order in orders]

    def alike(self, trees: Sequence[Tree]) -> list[_Degrees]:
        """Return the searches of trees whose stages have equally many replicas."""
        degrees = list(self._degrees_and_sizes())
        return [self._search(tree, *each, "zero-0") for tree in trees for each in degrees]

    def unlike(self, trees: Sequence[Tree]) -> list[_Degrees]:
        """Return the searches of trees whose stages have any numbers of replicas that divide the devices."""
        problem = self._problem
        if not may_deal(problem):
            return []
        (costs,), tp = self.costs_of(problem.pins.tp or 1, 1, "zero-0"), problem.pins.tp or 1
        known = {size: unlike_degrees(problem, costs, size) for size in costs.sizes}
        divide = {size: [one for one in known[size] if costs.devices % one == 0] for size in known}
        return [
            _Degrees(Partitioner(costs=costs, tree=tree, size=size, degrees=(*degrees,)), tp, "zero-0")
            for tree in trees
            for size, degrees in divide.items()
            if len(degrees) > 1
        ]

    def simulated(self, searches: Sequence[_Degrees], finalists: int) -> list[Candidate]:
        """Return the partitions with the least estimates, simulated."""
        batch = self._problem.job.global_batch
        found: list[_Found] = []
        for search in sorted(searches, key=lambda one: one.partitioner.least_s):
            most_s = found[finalists - 1].estimate_s if len(found) >= finalists else float("inf")
            if batch * search.partitioner.least_s >= most_s:
                break
            found += self._partitioned(search, most_s)
            found.sort(key=lambda one: one.estimate_s)
        return [self._judged(one) for one in found[:finalists]]

    def replicas(self) -> list[Candidate]:
        """Return the largest two micro-batches that fit on replicas of the whole model, simulated.

        Estimates overlap no reductions with computing. So those of many replicas are too long.
        """
        ranks, pins = self._problem.job.cluster.ranks, self._problem.pins
        found: list[_Found] = []
        for tp, dp, size in sorted(self._degrees_and_sizes(), reverse=True):
            if tp * dp == ranks and pins.pp in (None, 1) and len(found) < 2:
                found += self._partitioned(self._search(self.chains[0], tp, dp, size, "zero-0"), float("inf"))
        return [self._judged(one) for one in found]

    def _search(self, tree: Tree, tp: int, dp: int, size: int, sharding: Sharding) -> _Degrees:
        costs, pp = self.costs_of(tp, dp, sharding), self._problem.pins.pp
        if pp is not None:
            costs = [replace(one, devices=min(one.devices, pp * dp)) for one in costs]
        first, *others = costs
        partitioner = Partitioner(costs=first, others=(*others,), tree=tree, size=size, degrees=(dp,))
        return _Degrees(partitioner, tp, sharding)

    def _partitioned(self, search: _Degrees, most_s: float) -> list[_Found]:
        """Return the best partition, sharded if it does not fit otherwise, if its step may take `most_s`."""
        partitioner, tp, dp = search.partitioner, search.tp, search.partitioner.degrees[0]
        for sharding in self._shardings(dp) if len(partitioner.degrees) == 1 else (search.sharding,):
            if sharding != search.sharding:
                search = self._search(partitioner.tree, tp, dp, partitioner.size, sharding)
            every = [
                _Found(*self._estimated(graph, search.partitioner.kinds), graph, tp, sharding)
                for graph in search.partitioner.improving(
                    most_s / self._problem.job.global_batch, self._planner.tolerance
                )
            ]
            own = [one for one in every if self._is_asked(partitioner.tree, one)]
            if every or search.partitioner.within(float("inf")) is not None:
                return sorted(own, key=lambda one: one.estimate_s)[:1]
        return []

    def _is_asked(self, tree: Tree, found: _Found) -> bool:
        """Return True if the stages are as many as pinned, and those of the graph's tree have branches.

        Partitions without branches are those of chains.
        """
        stages, pinned = len(found.graph.stages), self._problem.pins.pp
        return pinned in (None, stages) and (tree is not self.tree or found.depth < stages)

    def _estimated(self, found: StageGraph, kinds: Sequence[GraphCosts]) -> tuple[float, int]:
        """Return the seconds of a step, and the stages on the longest path.

        The slowest stage has work all the time, but while the others on the longest path fill.
        """
        graph, size = self._problem.job.graph, found.micro_batch_size
        stages = in_order(graph, found.stages)
        edges = edges_of(graph, [stage.layers for stage in stages])
        each_s = [
            kinds[stage.kind].stage(stage.layers, size, stage.replicas, stage.recompute).computed_s
            for stage in stages
        ]
        filling_s = max(0.0, longest_path(edges, each_s) - max(each_s))
        step_s = found.sample_s * self._problem.job.global_batch + filling_s
        return step_s, round(longest_path(edges, [1.0] * len(stages)))

    def costs_of(self, tp: int, dp: int, sharding: Sharding) -> list[GraphCosts]:
        """Return by kind the costs of layers on `tp` ranks, with states that `dp` replicas share out."""
        key = (tp, sharding, 1 if sharding == "zero-0" else dp)
        if key not in self._costs:
            sizes = sizes_of(self._problem, self._problem.pins.dp or 1)
            self._costs[key] = [
                graph_costs(one, sizes, tp=tp, sharding=sharding, dp=dp) for one in self._kinds
            ]
        return self._costs[key]

    def _judged(self, found: _Found) -> Candidate:
        try:
            plan = plan_of(self._whole, found.graph, tp=found.tp, sharding=found.sharding)
        except InputError as error:
            return Candidate(verdict=Verdict.REFUSED, reason=str(error.violations[0]))
        return judged_plan(self._whole, plan)

    def _degrees_and_sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yield (tp, dp, micro-batch size), but for sizes that a profile was not measured at."""
        for tp, dp in degrees_of(self._problem):
            known = [costs.sizes for costs in self.costs_of(tp, dp, "zero-0")]
            for size in sizes_of(self._problem, dp):
                if all(size in sizes for sizes in known):
                    yield tp, dp, size

    def _shardings(self, dp: int) -> tuple[Sharding, ...]:
        pinned, job = self._problem.pins.sharding, self._problem.job
        if pinned is not None:
            return (pinned,)
        shares = dp > 1 and job.optimizer.steps_shards and overlaps(job.cluster)
        return ("zero-0", "zero-1") if shares else ("zero-0",)


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
