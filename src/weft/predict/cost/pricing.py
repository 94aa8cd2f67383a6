"""What cost hooks look at: a program, its plan, and tables of times that several hooks share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.device import Device
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.predict.cost.compute import ComputeModel, StageTimes
from weft.predict.cost.network import Network
from weft.program.kinds import MESSAGES
from weft.program.program import NONE, Ints, Program

_NodeLink = tuple[tuple[int, int], int, bool]
"""(node, group of nodes at the other end, whether bytes leave the node)."""


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
    def twins(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks that each rank with instructions stands for.

        A program folded to one replica stands for all of them, which are as slow as the slowest: each of its
        instructions costs what it costs the worst of the twins.
        """
        if "folded" not in self.program.meta:
            return {rank: (rank,) for rank in range(self.program.ranks)}
        simulated = int(self.program.meta["folded"])
        twins: dict[int, tuple[int, ...]] = {}
        for stage in self.plan.stages:
            lanes = zip(*(copy.ranks for copy in stage.replicas), strict=True)
            twins.update((lane[simulated], lane) for lane in lanes)
        return twins

    @cached_property
    def _device_sets(self) -> tuple[tuple[tuple[Device, ...], ...], Ints]:
        sets: dict[tuple[int, ...], int] = {}
        index = np.zeros(self.program.ranks, dtype=np.int64)
        for rank, twins in self.twins.items():
            groups = tuple(sorted({self.cluster.group_index_of(twin) for twin in twins}))
            index[rank] = sets.setdefault(groups, len(sets))
        groups_of = self.cluster.groups
        return tuple(tuple(groups_of[group].device for group in groups) for groups in sets), index

    @property
    def device_sets(self) -> tuple[tuple[Device, ...], ...]:
        """The combinations of devices that occur among the twins of a rank."""
        return self._device_sets[0]

    @property
    def device_set_of_rank(self) -> Ints:
        """Index into `device_sets`, shape (ranks,)."""
        return self._device_sets[1]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The pairs of (stage, device set) that occur."""
        sets = self.device_set_of_rank[self.program.columns.rank]
        pairs = np.unique(np.stack([self.program.columns.stage, sets], axis=1), axis=0)
        return tuple((stage, devices) for stage, devices in pairs.tolist())

    @cached_property
    def stage_times(self) -> Mapping[tuple[int, int], tuple[StageTimes, ...]]:
        """Times by place, one for each device of its set."""
        return {
            (stage, devices): tuple(
                self.compute.stage_times(
                    self.graph, self.plan.stages[stage].layers, self.shape(stage), self.plan.precision, device
                )
                for device in self.device_sets[devices]
            )
            for stage, devices in self.places
        }

    @cached_property
    def communicates(self) -> bool:
        """Whether anything is sent or reduced beside the computations."""
        return bool((self.program.columns.bytes > 0).any())

    def in_program_s(self, alone_s: float, device: Device) -> float:
        """Seconds of a computation of the program that takes `alone_s` by itself."""
        slowdown = self.compute.communication_slowdown(device) if self.communicates else 1.0
        return alone_s * slowdown + self.compute.instruction_s(device)

    @cached_property
    def tensor_s(self) -> Mapping[tuple[int, int], float]:
        """Seconds that the tensor ranks of (stage, replica) spend on all-reduces in one pass, if several."""
        seconds: dict[tuple[int, int], float] = {}
        for stage, described in enumerate(self.plan.stages):
            shape = self.shape(stage)
            if shape.tensor_parallel == 1:
                continue
            reduced = [self.graph.layers[layer].tensor_reduced(shape) for layer in described.layers]
            sizes = [round(elements * self.plan.element_bytes) for elements in reduced if elements]
            each = [
                sum(self.network.all_reduce_s(copy.ranks, size) for size in sizes)
                for copy in described.replicas
            ]
            worst = max(each)
            folded = "folded" in self.program.meta
            seconds.update(((stage, copy), worst if folded else own) for copy, own in enumerate(each))
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

    def message_s(self, rank: int, peer: int, sent_bytes: int) -> tuple[float, float]:
        """(occupancy, latency) of a message, of the twins' slowest.

        Twins run in step, so that their messages share links; where others meet them the simulator finds out.
        """
        pairs = list(zip(self.twins[rank], self.twins[peer], strict=True))
        sharing = Counter(link for pair in pairs for link in self._links_between(*pair))
        return max(
            (
                self.network.message_s(
                    *pair, sent_bytes, max((sharing[link] for link in self._links_between(*pair)), default=1)
                )
                for pair in pairs
            ),
            key=sum,
        )

    @cached_property
    def links(self) -> Ints:
        """Numbers of the two links that each message between nodes occupies, else -1: (instructions, 2).

        The messages of a rank's twins are one flow here, with as large a share as that of any other rank.
        """
        columns = self.program.columns
        links = np.full((len(columns), 2), NONE, dtype=np.int64)
        sends = np.flatnonzero(np.isin(columns.kind, [send for send, _ in MESSAGES]))
        ends, which = np.unique(
            np.stack([columns.rank[sends], columns.peer[sends]], axis=1), axis=0, return_inverse=True
        )
        numbers: dict[_NodeLink, int] = {}
        table = np.full_like(ends, NONE)
        for index, pair in enumerate(ends.tolist()):
            used = self._links_between(*pair)
            if used:
                table[index] = [numbers.setdefault(link, len(numbers)) for link in used]
        links[sends] = table[which.ravel()]
        return links

    def _links_between(self, rank: int, peer: int) -> tuple[_NodeLink, ...]:
        """By which link a message leaves its node and by which it enters another; none inside a node.

        A node has one link in each direction for every group of nodes it talks to.
        """
        here, there = self.cluster.node_of(rank), self.cluster.node_of(peer)
        if here == there:
            return ()
        return (here, there[0], True), (there, here[0], False)
