"""What cost hooks look at: a program, its plan, and tables of times that several hooks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.predict.cost.compute import ComputeModel, StageTimes
from weft.predict.cost.network import Network
from weft.program.program import Ints, Program


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A plan's program in front of its cost models; tables are made when first asked for."""

    program: Program
    plan: Plan
    graph: LayerGraph
    cluster: Cluster
    compute: ComputeModel
    network: Network

    def shape(self, stage: int) -> Shape:
        tensor_parallel = len(self.plan.stages[stage].replicas[0].ranks)
        return Shape(self.plan.micro_batch_size, self.plan.sequence, tensor_parallel)

    @cached_property
    def group_of_rank(self) -> Ints:
        """Index of each rank's node group: its kind of device."""
        ranks = range(self.program.ranks)
        return np.array([self.cluster.group_index_of(rank) for rank in ranks], dtype=np.int64)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The pairs of (stage, node group) that occur."""
        groups = self.group_of_rank[self.program.columns.rank]
        pairs = np.unique(np.stack([self.program.columns.stage, groups], axis=1), axis=0)
        return tuple((stage, group) for stage, group in pairs.tolist())

    @cached_property
    def stage_times(self) -> Mapping[tuple[int, int], StageTimes]:
        """Times by (stage, node group)."""
        return {
            (stage, group): self.compute.stage_times(
                self.graph,
                self.plan.stages[stage].layers,
                self.shape(stage),
                self.plan.precision,
                self.cluster.groups[group].device,
            )
            for stage, group in self.places
        }

    @cached_property
    def tensor_s(self) -> Mapping[tuple[int, int], float]:
        """Seconds that the tensor ranks of (stage, replica) spend on all-reduces in one pass."""
        seconds: dict[tuple[int, int], float] = {}
        for stage, described in enumerate(self.plan.stages):
            shape = self.shape(stage)
            reduced = [self.graph.layers[layer].tensor_reduced(shape) for layer in described.layers]
            sizes = [round(elements * self.plan.element_bytes) for elements in reduced if elements]
            for replica, copy in enumerate(described.replicas):
                if len(copy.ranks) > 1:
                    seconds[stage, replica] = sum(self.network.all_reduce_s(copy.ranks, b) for b in sizes)
        return seconds

    @cached_property
    def reduce_sharing(self) -> Ints:
        """For each group of the program, how many groups use the link of one of its nodes at once."""
        nodes = [{self.cluster.node_of(rank) for rank in group} for group in self.program.groups]
        users: dict[tuple[int, int], int] = defaultdict(int)
        for touched in nodes:
            if len(touched) > 1:
                for node in touched:
                    users[node] += 1
        sharing = [max((users[node] for node in touched), default=1) for touched in nodes]
        return np.maximum(np.array(sharing, dtype=np.int64), 1)

    def flows(self, rank: int, peer: int) -> int:
        """Messages that leave the node of `rank` at the same time as one from `rank` to `peer`.

        Replicas and tensor lanes of one stage run in step, so that all their messages to the next stage leave
        at once; messages of other stages are taken to come at other times.
        """
        return self._flows.get((rank, peer), 1)

    @cached_property
    def _flows(self) -> Mapping[tuple[int, int], int]:
        flows: dict[tuple[int, int], int] = {}
        for producer, consumer in self.program.obligations.stage_edges:
            leaving: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
            copies = zip(
                self.plan.stages[producer].replicas, self.plan.stages[consumer].replicas, strict=False
            )
            for here, there in copies:
                for pair in zip(here.ranks, there.ranks, strict=False):
                    for rank, peer in (pair, pair[::-1]):
                        if self.cluster.node_of(rank) != self.cluster.node_of(peer):
                            leaving[self.cluster.node_of(rank)].append((rank, peer))
            for pairs in leaving.values():
                for pair in pairs:
                    flows[pair] = max(flows.get(pair, 1), len(pairs))
        return flows
