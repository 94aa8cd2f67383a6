"""Plans whose replicas have tensor degrees of their own: each group of nodes holds whole pipelines.

Four small devices may hold a replica beside two large ones. Every pipeline lies in one group of nodes, and
all have the same cut into stages. They share the batch by speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import numpy as np

from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Recompute
from weft.planning.planners.bounds import Bounds, LayerBytes
from weft.planning.planners.weft.degrees import MOST_STAGES, DegreePlan, decisions, plan_of, words_of
from weft.planning.planners.weft.stages import Dealt, Way, deal
from weft.planning.planners.weft.uneven import SCHEDULE, UnevenSpace
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints
from weft.program.schedules.ring import divisors

# Most kinds of nodes whose degrees are searched together.
_MOST_KINDS = 3


@dataclass(frozen=True, slots=True)
class _Pipelines:
    """The pipelines of a plan: for each the ranks of its stages, shape (stages, tensor ranks)."""

    ranks: tuple[Ints, ...]

    @property
    def stages(self) -> int:
        return len(self.ranks[0])

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(held.shape[1] for held in self.ranks)


class ReplicaSpace:
    """The plans of one problem whose replicas have unlike tensor degrees."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._problem, self._bounds = problem, bounds
        self._uneven = UnevenSpace(problem, bounds)
        self._words = words_of(problem)

    def search(self) -> list[DegreePlan]:
        """Return the plans that fit by their bounds, least estimates first: one for each set of pipelines.

        Raises:
            InputError: when a profile was not measured at a micro-batch size or tensor degree.
        """
        best = (self._best_of(one) for one in self._sets())
        return sorted((one for one in best if one is not None), key=lambda one: one.estimate_s)

    def _sets(self) -> Iterator[_Pipelines]:
        """Yield pipelines that use every device; groups of nodes of one kind have equal ones.

        Kinds are devices and their number on a node. Of many kinds, there are too many combinations.
        """
        problem, cluster = self._problem, self._problem.job.cluster
        pins, graph, groups = problem.pins, problem.job.graph, cluster.groups
        open_axes = pins.tp is None and {pins.cp, pins.ep, pins.loops} <= {None, 1}
        asked = pins.schedule in (None, SCHEDULE) and (problem.sync or DENSE) == DENSE
        shards_nothing = pins.sharding in (None, "zero-0")
        kinds = list(dict.fromkeys((group.device.name, group.devices) for group in groups))
        few = 1 < len(kinds) <= _MOST_KINDS
        if not (open_axes and asked and shards_nothing and graph.is_chain and few):
            return
        starts = [0, *accumulate(group.count * group.devices for group in groups)]
        held = [np.arange(start, end, dtype=np.int64) for start, end in pairwise(starts)]
        kind_of = [kinds.index((group.device.name, group.devices)) for group in groups]
        legal = [
            [one for one in divisors(devices) if graph.refuse_tensor(one) is None] for _, devices in kinds
        ]
        # Stages that share a weight hold shards of it that do not match.
        most = 1 if graph.tied else min(MOST_STAGES, len(graph.layers))
        for stages, *degrees in product(range(1, most + 1), *legal):
            distinct = sorted(set(degrees))
            odd = any(more % fewer for fewer, more in pairwise(distinct))
            pairs = [(ranks, degrees[kind]) for ranks, kind in zip(held, kind_of, strict=True)]
            whole = not any(len(ranks) % (stages * degree) for ranks, degree in pairs)
            if len(distinct) > 1 and whole and not odd and pins.pp in (None, stages):
                found = _Pipelines(
                    tuple(one for ranks, degree in pairs for one in ranks.reshape(-1, stages, degree))
                )
                if pins.dp in (None, len(found.ranks)):
                    yield found

    def _best_of(self, pipelines: _Pipelines) -> DegreePlan | None:
        """Return the plan of some pipelines with the least estimate; None if none fits."""
        problem, found = self._problem, None
        for layout in decisions(problem, len(pipelines.ranks), ("zero-0",), uneven=True):
            dealt = self._dealt(pipelines, layout)
            if dealt is None:
                continue
            estimate_s = dealt.pipeline_s + self._reduced_s(pipelines, layout, dealt)
            if found is None or estimate_s < found[0]:
                found = estimate_s, layout, dealt
        if found is None:
            return None
        estimate_s, layout, dealt = found
        ranks = [[one[stage].tolist() for one in pipelines.ranks] for stage in range(pipelines.stages)]
        mesh = {"pp": sum(one.size for one in pipelines.ranks), "dp": 1}
        return DegreePlan(
            plan=plan_of(problem, layout, dealt, ranks, self._words, mesh), estimate_s=estimate_s
        )

    def _dealt(self, pipelines: _Pipelines, layout: Layout) -> Dealt | None:
        """Return cuts of the layers and shares of the batch; None if nothing fits."""
        uneven, stages = self._uneven, pipelines.stages
        wide = [replace(layout, pp=stages, tp=degree) for degree in pipelines.degrees]
        paces = [
            uneven.slowest(one, held[:, None])[:, 0] for one, held in zip(wide, pipelines.ranks, strict=True)
        ]
        # For `deal`, devices of one pace and unlike degrees have unlike paces.
        kinds: dict[tuple[int, int], int] = {}
        pairs = list(zip(pipelines.degrees, paces, strict=True))
        pace = np.array(
            [
                [kinds.setdefault((degree, int(own[stage])), len(kinds)) for degree, own in pairs]
                for stage in range(stages)
            ]
        )
        rooms = np.array([uneven.room_bytes(held) for held in pipelines.ranks])
        ways = []
        for word in self._words:
            times_s = [uneven.seconds_at(self._at(layout, degree, word), one) for degree, one in kinds]
            ways.append(Way(times_s, [self._most_bytes(pipelines, layout, word, rooms)] * len(kinds)))
        micro_batches = self._problem.job.global_batch // layout.micro_batch_size
        in_flight = (stages - np.arange(stages)).astype(np.float64)
        return deal(ways, pace, np.arange(stages), rooms[0], in_flight, micro_batches, uneven=True)

    def _at(self, layout: Layout, degree: int, word: Recompute) -> Layout:
        return replace(layout, tp=degree).recomputing(word)

    def _most_bytes(
        self, pipelines: _Pipelines, layout: Layout, word: Recompute, rooms: Floats
    ) -> LayerBytes:
        """Return the bytes of layers where they take most of a device, scaled to the first pipeline's."""
        scaled = {
            (degree, float(rooms[0].min() / room.min()))
            for degree, room in zip(pipelines.degrees, rooms, strict=True)
        }
        each = [
            [factor * part for part in self._bounds.layer_bytes(self._at(layout, degree, word))]
            for degree, factor in scaled
        ]
        return LayerBytes(*(np.max(parts, axis=0) for parts in zip(*each, strict=True)))

    def _reduced_s(self, pipelines: _Pipelines, layout: Layout, dealt: Dealt) -> float:
        """Return the seconds in which the replicas of the slowest stage add up all shards of its gradient.

        Sums of all shards share the links of the nodes.
        """
        network, widest = self._problem.cost_model.network, max(pipelines.degrees)
        ends = [0, *accumulate(dealt.layers_per_stage)]
        gradients, _ = self._bounds.exchanged_bytes(replace(layout, tp=widest))
        most_s = 0.0
        for stage in range(pipelines.stages):
            size = round(float(gradients[ends[stage] : ends[stage + 1]].sum()))
            first = [int(held[stage, 0]) for held in pipelines.ranks]
            most_s = max(most_s, widest * network.all_reduce_s(first, size))
        return most_s
