"""Plans whose replicas have tensor degrees of their own: each group of nodes holds whole pipelines.

Four small devices may hold a replica beside two large ones. Every pipeline lies in one group of nodes, and
all have the same cut into stages. They share the batch by speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import numpy as np

from weft.describe.layout import Layout
from weft.describe.plan import Recompute
from weft.planning.planners.bounds import LayerBytes
from weft.planning.planners.weft.stages import Dealt, Way, deal
from weft.planning.planners.weft.unlike_space import MOST_STAGES, UnlikeSpace, in_kinds
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

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def mesh(self) -> Mapping[str, int]:
        return {"pp": sum(one.size for one in self.ranks), "dp": 1}

    @property
    def of_stages(self) -> list[list[list[int]]]:
        return [[one[stage].tolist() for one in self.ranks] for stage in range(self.stages)]


class ReplicaSpace(UnlikeSpace[_Pipelines]):
    """The plans of one problem whose replicas have unlike tensor degrees."""

    shardings, uneven = ("zero-0",), True

    def placements(self) -> Iterator[_Pipelines]:
        """Yield sets of pipelines; groups of nodes of one kind have equal ones.

        Kinds are devices and their number on a node. Of many kinds, there are too many combinations.
        """
        pins, graph, groups = self.problem.pins, self.problem.job.graph, self.problem.job.cluster.groups
        kinds = list(dict.fromkeys((group.device.name, group.devices) for group in groups))
        if pins.sharding not in (None, *self.shardings) or not 1 < len(kinds) <= _MOST_KINDS:
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
                if pins.dp in (None, found.replicas):
                    yield found

    def dealt(self, placed: _Pipelines, layout: Layout) -> Dealt | None:
        paces, stages = self.paces, placed.stages
        wide = [replace(layout, pp=stages, tp=degree) for degree in placed.degrees]
        pace = [paces.slowest(one, held[:, None])[:, 0] for one, held in zip(wide, placed.ranks, strict=True)]
        degrees = np.tile(placed.degrees, (stages, 1))
        kinds, kind = in_kinds(degrees, np.stack(pace, axis=1))
        rooms = np.array([paces.room_bytes(held) for held in placed.ranks])
        ways = []
        for word in self.words:
            times_s = [paces.seconds_at(_at(layout, degree, word), one) for degree, one in kinds]
            ways.append(Way(times_s, [self._most_bytes(placed, layout, word, rooms)] * len(kinds)))
        micro_batches = self.problem.job.global_batch // layout.micro_batch_size
        in_flight = (stages - np.arange(stages)).astype(np.float64)
        return deal(ways, kind, np.arange(stages), rooms[0], in_flight, micro_batches, uneven=self.uneven)

    def _most_bytes(self, placed: _Pipelines, layout: Layout, word: Recompute, rooms: Floats) -> LayerBytes:
        """Return the bytes of layers where they take most of a device, scaled to the first pipeline's."""
        scaled = {
            (degree, float(rooms[0].min() / room.min()))
            for degree, room in zip(placed.degrees, rooms, strict=True)
        }
        each = [
            [factor * part for part in self.bounds.layer_bytes(_at(layout, degree, word))]
            for degree, factor in scaled
        ]
        return LayerBytes(*(np.max(parts, axis=0) for parts in zip(*each, strict=True)))

    def reduced_s(self, placed: _Pipelines, layout: Layout, found: Dealt) -> float:
        """Return the seconds of the slowest stage's sums; those of all shards share the links."""
        network, widest = self.problem.cost_model.network, max(placed.degrees)
        ends = [0, *accumulate(found.layers_per_stage)]
        gradients, _ = self.bounds.exchanged_bytes(replace(layout, tp=widest))
        most_s = 0.0
        for stage in range(placed.stages):
            size = round(float(gradients[ends[stage] : ends[stage + 1]].sum()))
            first = [int(held[stage, 0]) for held in placed.ranks]
            most_s = max(most_s, widest * network.all_reduce_s(first, size))
        return most_s


def _at(layout: Layout, degree: int, word: Recompute) -> Layout:
    return replace(layout, tp=degree).recomputing(word)
