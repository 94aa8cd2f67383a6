"""Plans whose stages have tensor degrees of their own: every stage on devices of one group of nodes.

Nodes of four devices and nodes of two have no mesh of tensor degree four that uses all devices. Slow
devices may need more ranks for a stage than fast ones. So each group of nodes is cut into equal stages. All
stages have equally many replicas. The devices of a stage, divided by these, are its tensor degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import gcd

import numpy as np

from weft.describe.layout import Layout
from weft.planning.planners.weft.estimates import LIGHT
from weft.planning.planners.weft.placement import placements_of
from weft.planning.planners.weft.stages import Dealt, Way, deal
from weft.planning.planners.weft.unlike_space import MOST_STAGES, UnlikeSpace, in_kinds
from weft.program.arrays import Ints
from weft.program.schedules.ring import divisors

# Orders of the groups of nodes.
_ORDERS = 2


@dataclass(frozen=True, slots=True)
class _StageRow:
    """Stages in a row: for each the ranks of its replicas, shape (replicas, tensor ranks)."""

    ranks: tuple[Ints, ...]

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(held.shape[1] for held in self.ranks)

    @property
    def replicas(self) -> int:
        return len(self.ranks[0])

    @property
    def mesh(self) -> Mapping[str, int]:
        return {"pp": sum(self.degrees), "dp": self.replicas}

    @property
    def of_stages(self) -> list[list[list[int]]]:
        return [held.tolist() for held in self.ranks]


class DegreeSpace(UnlikeSpace[_StageRow]):
    """The plans of one problem whose stages have unlike tensor degrees."""

    shardings, uneven = LIGHT, False

    def placements(self) -> Iterator[_StageRow]:
        pins, cluster, graph = self.problem.pins, self.problem.job.cluster, self.problem.job.graph
        starts = [0, *accumulate(group.count * group.devices for group in cluster.groups)]
        orders = dict.fromkeys(placement.groups for placement in placements_of(cluster, _ORDERS))
        for order in orders if len(cluster.groups) > 1 else ():
            held = [range(starts[group], starts[group + 1]) for group in order]
            cuts = [[one for one in divisors(len(ranks)) if one <= MOST_STAGES] for ranks in held]
            for stages in product(*cuts):
                if sum(stages) > len(graph.layers) or pins.pp not in (None, sum(stages)):
                    continue
                widths = [len(ranks) // count for ranks, count in zip(held, stages, strict=True)]
                on_node = [cluster.groups[group].devices for group in order]
                for replicas in divisors(gcd(*widths)):
                    degrees = [width // replicas for width in widths]
                    if pins.dp in (None, replicas) and self._possible(degrees, on_node):
                        yield _row(held, stages, replicas)

    def _possible(self, degrees: Sequence[int], on_node: Sequence[int]) -> bool:
        """Return True for unlike degrees on whole nodes or parts of them that divide the layers."""
        distinct = sorted(set(degrees))
        return (
            len(distinct) > 1
            and not any(more % fewer for fewer, more in pairwise(distinct))
            and not any(devices % degree for degree, devices in zip(degrees, on_node, strict=True))
            and all(self.problem.job.graph.refuse_tensor(degree) is None for degree in distinct)
        )

    def dealt(self, placed: _StageRow, layout: Layout) -> Dealt | None:
        bounds, paces, stages = self.bounds, self.paces, len(placed.ranks)
        wide = [replace(layout, pp=stages, tp=degree) for degree in placed.degrees]
        pace = [paces.slowest(one, held[None])[0] for one, held in zip(wide, placed.ranks, strict=True)]
        degrees = np.repeat(placed.degrees, placed.replicas).reshape(stages, -1)
        kinds, kind = in_kinds(degrees, np.array(pace))
        ways = []
        for word in self.words:
            of_degree = {one.tp: one.recomputing(word) for one in wide}
            times_s = [paces.seconds_at(of_degree[degree], pace) for degree, pace in kinds]
            ways.append(Way(times_s, [bounds.layer_bytes(of_degree[degree]) for degree, _ in kinds]))
        room = np.array([paces.room_bytes(held.reshape(1, -1))[0] for held in placed.ranks])
        micro_batches = self.problem.job.global_batch // layout.micro_batch_size
        share = micro_batches // placed.replicas
        in_flight = np.minimum(stages - np.arange(stages), share).astype(np.float64)
        return deal(ways, kind, np.arange(stages), room, in_flight, micro_batches, uneven=self.uneven)

    def reduced_s(self, placed: _StageRow, layout: Layout, found: Dealt) -> float:
        if placed.replicas == 1:
            return 0.0
        network, ends = self.problem.cost_model.network, [0, *accumulate(found.layers_per_stage)]
        most_s = 0.0
        for index, held in enumerate(placed.ranks):
            gradients, _ = self.bounds.exchanged_bytes(replace(layout, tp=held.shape[1]))
            size = round(float(gradients[ends[index] : ends[index + 1]].sum()))
            most_s = max(most_s, network.all_reduce_s(held[:, 0].tolist(), size))
        return most_s


def _row(held: Sequence[range], stages: Sequence[int], replicas: int) -> _StageRow:
    """Return equal stages on the ranks of each group of nodes, replicas on neighbouring ranks."""
    return _StageRow(
        tuple(
            part.reshape(replicas, -1)
            for ranks, count in zip(held, stages, strict=True)
            for part in np.array(ranks, dtype=np.int64).reshape(count, -1)
        )
    )
