"""`PartitionSearch`: the partitions of a graph of layers with the least estimates, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.graph_costs import GraphCosts, graph_costs
from weft.planning.planners.graphpipe.part_plans import StageGraph
from weft.planning.planners.graphpipe.partitioner import Partitioner
from weft.planning.planners.graphpipe.plans import (
    edges_of,
    in_order,
    longest_path,
    plan_of,
)
from weft.planning.planners.graphpipe.questions import (
    degrees_of,
    may_deal,
    sizes_of,
    unlike_degrees,
)
from weft.planning.planners.graphpipe.series_parallel import decompose, earliest_ends
from weft.planning.planners.graphpipe.trees import Tree, joined
from weft.planning.planners.simulated import judged_plan
from weft.planning.planners.space import overlaps
from weft.planning.problem import Problem


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


class PartitionSearch:
    """The partitions of one problem, which may be on a part of the nodes of the `whole` one.

    With `kinds`, the problem on the devices of each kind alone, stages have the costs of their own kind.
    `tolerance` is the relative distance from the best partition at which a search ends.
    """

    def __init__(
        self, problem: Problem, whole: Problem, tolerance: float, kinds: Sequence[Problem] = ()
    ) -> None:
        self._problem, self._whole, self._tolerance = problem, whole, tolerance
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
                    most_s / self._problem.job.global_batch, self._tolerance
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
