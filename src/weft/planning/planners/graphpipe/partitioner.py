"""The partition of a graph of layers into stages: binary search over a dynamic program (GraphPipe).

The program is algorithm 1 of arXiv 2406.17145. It takes the series-parallel tree part by part, the last one
first. The samples in flight of a stage depend on the stages behind it. A part has few best plans: those with
fewer devices or fewer samples in flight than all others. So the program keeps them instead of a table by
numbers of devices. Branches with the same structure and costs are planned once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.alike import Signature, Signatures
from weft.planning.planners.graphpipe.part_plans import (
    Front,
    PartPlan,
    RunOfParts,
    StageGraph,
    StageOfLayers,
    Stages,
    StageWay,
    beside,
    best_of,
    chained,
    higher,
    listed,
    packed,
)
from weft.planning.planners.graphpipe.trees import Parallel, Series, Tree, layers_of


@dataclass(kw_only=True)
class Partitioner:
    """The dynamic program for one size of micro-batches.

    Attributes:
        costs: the layers and their devices, of the first kind where there are several.
        others: the same layers on devices of other kinds. A stage has devices of one kind.
        tree: their series-parallel tree.
        size: samples of a replica's micro-batch.
        degrees: the numbers of replicas that a stage may have, rising. All divide the batch's micro-batches.
        turn: micro-batches of a turn, k of kFkB.
    """

    costs: GraphCosts
    tree: Tree
    size: int
    degrees: tuple[int, ...]
    turn: int = 1
    others: tuple[GraphCosts, ...] = ()
    _known_runs: dict[tuple[int, ...], RunOfParts] = field(default_factory=dict, init=False)
    _runs: dict[tuple[int, int, int], RunOfParts] = field(default_factory=dict, init=False)
    _suffixes: dict[tuple[int, int, Front], list[PartPlan]] = field(default_factory=dict, init=False)
    _branches: dict[tuple[Signature, Front], tuple[Tree, list[PartPlan]]] = field(
        default_factory=dict, init=False
    )
    _parallels: dict[tuple[int, Front, int | None, int | None], list[PartPlan]] = field(
        default_factory=dict, init=False
    )
    _lines: dict[tuple[Tree, ...], tuple[Tree, ...]] = field(default_factory=dict, init=False)
    _limit_s: float = field(default=0.0, init=False)

    def search(self, most_s: float = float("inf"), tolerance: float = 1e-3) -> StageGraph | None:
        """Return the partition with the least seconds per sample, within a relative tolerance.

        None means that no partition takes at most `most_s` and fits.
        """
        return next(iter([*self.improving(most_s, tolerance)][::-1]), None)

    def improving(self, most_s: float = float("inf"), tolerance: float = 1e-3) -> Iterator[StageGraph]:
        """Yield partitions with fewer and fewer seconds per sample, up to the least; see `search`.

        Earlier ones may have fewer stages, and pipelines that are sooner full.
        """
        least = self.least_s
        best = self.within(most_s) if least <= most_s else None
        while best is not None:
            yield best
            found = None
            while found is None and best.sample_s - least > tolerance * best.sample_s:
                middle = (least + best.sample_s) / 2
                found = self.within(middle)
                if found is None:
                    least = middle
            best = found

    def within(self, limit_s: float) -> StageGraph | None:
        """Return the partition with the fewest samples in flight whose stages keep a limit; None without one.

        `limit_s` is in seconds per sample. Of equal partitions, one with fewer devices wins.
        """
        self._limit_s = limit_s
        self._suffixes.clear()
        self._branches.clear()
        self._parallels.clear()
        last: Front = tuple(self._rounds(each, each) for each in self._turns)
        plans = self._suffix(self._line(*_parts_of(self.tree)), 0, last)
        if not plans:
            return None
        best = min(plans, key=lambda plan: (plan.front, plan.devices))
        stages = tuple(listed(best.stages, self.degrees))
        return StageGraph(
            stages=stages,
            micro_batch_size=self.size,
            sample_s=max(self._sample_s(stage) for stage in stages),
            in_flight=max(stage.in_flight for stage in stages),
        )

    @cached_property
    def _turns(self) -> tuple[int, ...]:
        """By degree, the samples of a stage's turn."""
        return tuple(self.turn * self.size * degree for degree in self.degrees)

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.kinds)

    @cached_property
    def least_s(self) -> float:
        """A lower bound of the seconds per sample: all devices compute all the time."""
        least_s = [self._all_busy_s(costs) for costs in self.kinds]
        return least_s[0] if len(least_s) == 1 else 1.0 / sum(1.0 / one for one in least_s)

    def _all_busy_s(self, costs: GraphCosts) -> float:
        passes = costs.passes[self.size, costs.recomputes(self.size)[0]]
        work_s = float(passes.forward_s.sum() + passes.backward_s.sum())
        return work_s / (self.size * costs.devices)

    @cached_property
    def kinds(self) -> tuple[GraphCosts, ...]:
        """The costs on the devices of each kind."""
        return (self.costs, *self.others)

    @cached_property
    def _devices(self) -> int:
        return sum(packed(kind, costs.devices) for kind, costs in enumerate(self.kinds))

    def _sample_s(self, stage: StageOfLayers) -> float:
        asked, costs = (self.size, stage.replicas), self.kinds[stage.kind]
        return costs.sample_s(costs.stage(stage.layers, *asked, stage.recompute), *asked)

    def _rounds(self, samples: int, turn: int) -> int:
        """Return samples in flight as whole micro-batches of all replicas."""
        each = turn // self.turn
        return -(-samples // each) * each

    def _before(self, in_flight: int, degree: int) -> Front:
        """Return the front before a stage (GraphPipe, section 5)."""
        turn = self._turns[degree]
        if len(self._turns) == 1:
            return (in_flight + turn,)
        return tuple(self._rounds(in_flight + max(other, turn), other) for other in self._turns)

    def _suffix(self, parts: tuple[Tree, ...], first: int, after: Front) -> list[PartPlan]:
        """Return the best plans of the parts of a series from `first` on."""
        if first == len(parts):
            return [PartPlan(0, after, None)]
        key = (id(parts), first, after)
        if key not in self._suffixes:
            self._suffixes[key] = best_of(self._suffix_plans(parts, first, after), self._devices)
        return self._suffixes[key]

    def _suffix_plans(self, parts: tuple[Tree, ...], first: int, after: Front) -> Iterator[PartPlan]:
        yield from self._in_one_stage(parts, first, range(first + 1, len(parts) + 1), after)
        part, *others = parts[first : first + 3]
        fork = None
        if isinstance(part, int) and others:
            # Perhaps a stage of a branch holds the layer before the branches.
            fork, part, *others = part, *others
        if not isinstance(part, Parallel):
            return
        joins = [one for one in others[:1] if isinstance(one, int)]
        for join in (None, *joins):
            end = first + 1 + (fork is not None) + (join is not None)
            for rest in self._suffix(parts, end, after):
                for plan in self._parallel(part, rest.front, fork, join):
                    stages = chained(plan.stages, rest.stages)
                    yield PartPlan(plan.devices + rest.devices, plan.front, stages)

    def _in_one_stage(
        self,
        parts: tuple[Tree, ...],
        first: int,
        ends: Iterable[int],
        after: Front,
        floor: Front | None = None,
    ) -> Iterator[PartPlan]:
        """Yield plans whose first stage has the parts from `first` to one of the ends.

        `floor` is the front of other stages behind the first one.
        """
        for end in ends:
            run = self._run(parts, first, end)
            if run.least_s > self._limit_s:
                return
            if run.fastest_s <= self._limit_s:
                for rest in self._suffix(parts, end, after):
                    front = rest.front if floor is None else higher(rest.front, floor)
                    yield from self._stages(run, front, rest)

    def _run(self, parts: tuple[Tree, ...], first: int, end: int) -> RunOfParts:
        """Return the parts of a series from `first` to before `end` as one stage."""
        key = (id(parts), first, end)
        if key not in self._runs:
            shorter = self._runs.get((id(parts), first, end - 1))
            known, begin = ((), first) if shorter is None else (shorter.layers, end - 1)
            added = (layer for part in parts[begin:end] for layer in layers_of(part))
            self._runs[key] = self._run_of(tuple(sorted([*known, *added])))
        return self._runs[key]

    def _stages(self, run: RunOfParts, after: Front, rest: PartPlan) -> list[PartPlan]:
        """Return a plan with this run as a stage for each degree at which it fits."""
        plans: list[PartPlan] = []
        met = 0
        for way in run.ways:
            if way.devices == met or way.sample_s > self._limit_s:
                continue
            asked = after[way.degree]
            # A longer pipeline than the batch keeps the whole batch.
            in_flight = min(asked, self.costs.global_batch)
            kept = -(-in_flight // (self.size * self.degrees[way.degree]))
            if way.resident_bytes + kept * way.kept_bytes <= self.kinds[way.kind].memory_bytes:
                met = way.devices  # the fastest recomputation that fits
                stages = Stages((run, way, in_flight), None, None, rest.stages)
                plans.append(PartPlan(met + rest.devices, self._before(asked, way.degree), stages))
        return plans

    def _run_of(self, layers: tuple[int, ...]) -> RunOfParts:
        """Return rising layers as one stage, with the ways to run it: by degree, the fastest recomputation
        first."""
        if layers not in self._known_runs:
            ways: list[StageWay] = []
            least_s = fastest_s = float("inf")
            for kind, (index, degree) in product(range(len(self.kinds)), enumerate(self.degrees)):
                costs, devices = self.kinds[kind], packed(kind, degree)
                for word in costs.recomputes(self.size):
                    stage = costs.stage(layers, self.size, degree, word)
                    sample_s = costs.sample_s(stage, self.size, degree)
                    least_s = min(least_s, stage.computed_s / (self.size * degree))
                    fastest_s = min(fastest_s, sample_s)
                    held = stage.resident_bytes + stage.taken_bytes, stage.kept_bytes
                    ways.append(StageWay(kind, index, devices, word, sample_s, *held))
            self._known_runs[layers] = RunOfParts(layers, tuple(ways), least_s, fastest_s)
        return self._known_runs[layers]

    def _parallel(
        self, parallel: Parallel, after: Front, fork: int | None, join: int | None
    ) -> list[PartPlan]:
        """Return the best plans of branches side by side; stages of branches hold the fork and the join."""
        key = (id(parallel), after, fork, join)
        if key not in self._parallels:
            self._parallels[key] = best_of(self._parallel_plans(parallel, after, fork, join), self._devices)
        return self._parallels[key]

    def _parallel_plans(
        self, parallel: Parallel, after: Front, fork: int | None, join: int | None
    ) -> list[PartPlan]:
        branches = self._signatures.sorted(parallel.parts)
        if fork is None and join is None:
            return self._side_by_side(branches, after, whole=False)
        before_join = after if join is None else self._before_any(after)
        plans: list[PartPlan] = []
        owners: Sequence[int] = self._signatures.different(branches)
        for first in owners if fork is not None else (None,):
            for last in owners if join is not None else (None,):
                others = [one for index, one in enumerate(branches) if index not in (first, last)]
                found = self._side_by_side(others, before_join, whole=True)
                if join is not None and last is not None and last != first:
                    ending = self._suffix(self._line(*_parts_of(branches[last]), join), 0, after)
                    found = [beside(one, other) for one in found for other in ending]
                if fork is not None and first is not None:
                    parts = (fork, *_parts_of(branches[first]))
                    both = join is not None and first == last
                    line = self._line(*parts, join) if join is not None and both else self._line(*parts)
                    found = self._forked(line, found, after if both else before_join, both=both)
                plans += found
        return plans

    def _forked(
        self, line: tuple[Tree, ...], others: Iterable[PartPlan], after: Front, *, both: bool
    ) -> list[PartPlan]:
        """Return plans of a branch with the fork in its first stage, beside plans of the other branches.

        With `both` the branch has the join, too, and two stages at least: the others lie between them.
        """
        ends = range(2, len(line) + (not both))
        return [
            PartPlan(plan.devices + other.devices, plan.front, chained(plan.stages, other.stages))
            for other in others
            for plan in self._in_one_stage(line, 0, ends, after, other.front)
        ]

    def _before_any(self, after: Front) -> Front:
        """Return the front before a stage whose degree is not known yet."""
        fronts = [self._before(in_flight, degree) for degree, in_flight in enumerate(after)]
        return tuple(map(max, zip(*fronts, strict=True)))

    def _side_by_side(self, branches: Sequence[Tree], after: Front, *, whole: bool) -> list[PartPlan]:
        """Return the best plans of branches; several neighbours may share a stage, with `whole` even all."""
        count = len(branches)
        best = {count: [PartPlan(0, (0,) * len(self.degrees), None)]}
        for begin in reversed(range(count)):
            plans = [
                beside(one, rest) for one in self._branch(branches[begin], after) for rest in best[begin + 1]
            ]
            held = [*layers_of(branches[begin])]
            for end in range(begin + 2, count + 1 if whole or begin else count):
                held += layers_of(branches[end - 1])
                run = self._run_of(tuple(sorted(held)))
                shared = self._stages(run, after, PartPlan(0, after, None))
                plans += [beside(one, rest) for one in shared for rest in best[end]]
            best[begin] = best_of(plans, self._devices)
        return best[0]

    def _branch(self, branch: Tree, after: Front) -> list[PartPlan]:
        """Return the best plans of a branch: those of an alike one, with its own layers."""
        key = (self._signatures.of(branch), after)
        if key not in self._branches:
            self._branches[key] = (branch, self._suffix(self._line(*_parts_of(branch)), 0, after))
        known, plans = self._branches[key]
        if known is branch:
            return plans
        renamed = dict(zip(layers_of(known), layers_of(branch), strict=True))
        return [plan._replace(stages=Stages(None, plan.stages, renamed, None)) for plan in plans]

    def _line(self, *parts: Tree) -> tuple[Tree, ...]:
        """Return parts in series as one object for all uses, which keys of tables name."""
        return self._lines.setdefault(parts, parts)


def _parts_of(tree: Tree) -> tuple[Tree, ...]:
    return tree.parts if isinstance(tree, Series) else (tree,)
