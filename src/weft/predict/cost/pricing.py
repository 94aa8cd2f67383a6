"""What cost hooks look at: a program, its plan, and tables of times that several hooks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.device import Device
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, tensor_groups_of
from weft.predict.cost.compute import ComputeModel, StageTimes
from weft.predict.cost.exchanges import Exchanges, stage_exchanges
from weft.predict.cost.network import Network
from weft.program.buffers import last_gradients
from weft.program.codes import distinct_rows
from weft.program.fold import KEPT_LANE, KEPT_REPLICA, twins_of
from weft.program.kinds import GATHER, REDUCE, REDUCE_ACROSS, REDUCE_TIED, STEP, is_send
from weft.program.layout import counterparts_of, islands_of
from weft.program.program import NONE, Ints, Program

# What replicas do with those of their own island, or with their counterparts in the others.
_BY_ISLAND = (GATHER, REDUCE, REDUCE_ACROSS)

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
        return self.plan.shape(stage)

    @cached_property
    def twins(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks that each rank with instructions stands for.

        Those of a folded program stand for several, which are as slow as the slowest: each of its
        instructions costs what it costs the worst of the twins.
        """
        return twins_of(self.program, ([copy.ranks for copy in stage.replicas] for stage in self.plan.stages))

    @cached_property
    def _paces(self) -> tuple[tuple[tuple[tuple[int, float], ...], ...], Ints]:
        """The combinations of (group of nodes, speed) among the twins of a rank, and that of each rank."""
        sets: dict[tuple[tuple[int, float], ...], int] = {}
        index = np.zeros(self.program.ranks, dtype=np.int64)
        for rank, twins in self.twins.items():
            paces = {(self.cluster.group_index_of(twin), self.cluster.speed_of(twin)) for twin in twins}
            index[rank] = sets.setdefault(tuple(sorted(paces)), len(sets))
        return tuple(sets), index

    @cached_property
    def device_sets(self) -> tuple[tuple[Device, ...], ...]:
        """The combinations of devices that occur among the twins of a rank."""
        groups = self.cluster.groups
        return tuple(tuple(groups[group].device for group, _ in paces) for paces in self._paces[0])

    @cached_property
    def speed_sets(self) -> tuple[tuple[float, ...], ...]:
        """Relative speed of each device of `device_sets`."""
        return tuple(tuple(speed for _, speed in paces) for paces in self._paces[0])

    @property
    def device_set_of_rank(self) -> Ints:
        """Index into `device_sets` and `speed_sets`, shape (ranks,)."""
        return self._paces[1]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The pairs of (stage, device set) that occur."""
        sets = self.device_set_of_rank[self.program.columns.rank]
        stages = self.program.columns.stage
        first = distinct_rows(stages, sets)[0]
        return tuple(sorted(zip(stages[first].tolist(), sets[first].tolist(), strict=True)))

    @cached_property
    def stage_times(self) -> Mapping[tuple[int, int], tuple[StageTimes, ...]]:
        """Times by place, one for each device of its set."""
        return {
            (stage, devices): tuple(
                self.compute.stage_times(
                    self.graph,
                    self.plan.stages[stage].layers,
                    self.shape(stage),
                    self.plan.precision,
                    device,
                    recompute=self.plan.stages[stage].recompute,
                    update_share=self._update_share(stage),
                )
                for device in self.device_sets[devices]
            )
            for stage, devices in self.places
        }

    def _update_share(self, stage: int) -> float:
        """Part of a stage's parameters that each replica steps: its own where states are shared out."""
        return 1.0 / self.plan.sharers(stage)

    @cached_property
    def slowdowns(self) -> npt.NDArray[np.float64]:
        """Factors of computations and of transfers that overlap, of each rank's worst twin; (2, ranks)."""
        sets = [[self.compute.slowdowns(device) for device in devices] for devices in self.device_sets]
        worst = np.array([np.max(factors, axis=0) for factors in sets]).reshape(-1, 2)
        slowdowns: npt.NDArray[np.float64] = worst[self.device_set_of_rank].T
        return slowdowns

    def read_gradients_s(self, rank: int) -> float:
        """Seconds in which a rank, or the slowest that it stands for, reads the gradients it answers for.

        Replicas that all hold the same summed gradient answer for equal shares of it.
        """
        devices = int(self.device_set_of_rank[rank])
        seconds = 0.0
        for stage in self._trained_stages[rank]:
            copies = len(self.plan.stages[stage].replicas) // self.plan.sharers(stage)
            slowest = max(
                times.read_gradients_s / speed
                for times, speed in zip(
                    self.stage_times[stage, devices], self.speed_sets[devices], strict=True
                )
            )
            seconds += slowest / copies
        return seconds

    @cached_property
    def _trained_stages(self) -> Mapping[int, tuple[int, ...]]:
        """The stages of each rank that steps any."""
        columns = self.program.columns
        rows = np.flatnonzero(columns.kind == STEP)
        stages: dict[int, tuple[int, ...]] = {}
        for rank, stage in zip(columns.rank[rows].tolist(), columns.stage[rows].tolist(), strict=True):
            stages[rank] = (*stages.get(rank, ()), stage)
        return stages

    def in_program_s(self, alone_s: float, device: Device, speed: float) -> float:
        """Seconds of a computation of the program that takes a device of speed 1 `alone_s` by itself."""
        return (alone_s + self.compute.instruction_s(device)) / speed

    @cached_property
    def exchanges(self) -> Mapping[tuple[int, int], Exchanges]:
        """What the ranks of (stage, replica) spend on exchanges among them, if they are several."""
        found = stage_exchanges(self.plan, self.graph, self.network, self._place_of)
        if self.compute.profile is not None:
            found = {
                place: one
                for place, one in found.items()
                if not self.compute.contains_exchanges(self._device_of(place), self.shape(place[0]))
            }
        if KEPT_REPLICA not in self.program.meta:
            return found
        worst: dict[int, Exchanges] = {}
        for (stage, _), one in found.items():
            worst[stage] = Exchanges(*map(max, zip(worst.get(stage, one), one, strict=True)))
        return {place: worst[place[0]] for place in found}

    def _device_of(self, place: tuple[int, int]) -> Device:
        stage, replica = place
        return self.cluster.device_of(self.plan.stages[stage].replicas[replica].ranks[0])

    @cached_property
    def completes_gradient(self) -> Ints:
        """By instruction, 1 where context ranks add up their stage's gradient at its end, else 0."""
        completes = np.zeros(len(self.program), dtype=np.int64)
        if self.plan.context_parallel > 1:
            for rank in range(self.program.ranks):
                completes[list(last_gradients(self.program, rank))] = 1
        return completes

    def _place_of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks, or, inside a node, its group and how many they are: others like them are as near."""
        nodes = {self._nodes[rank] for rank in ranks}
        # No rank is NONE, so that the two kinds of place never mix.
        return (NONE, nodes.pop()[0], len(ranks)) if len(nodes) == 1 else ranks

    @cached_property
    def _nodes(self) -> tuple[tuple[int, int], ...]:
        """Node of each rank of the cluster."""
        return tuple(self.cluster.node_of(rank) for rank in range(self.cluster.ranks))

    @cached_property
    def twin_groups(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """By group that the program uses, the ranks of all groups that it stands for, itself first.

        Where one replica is simulated in place of all, its island stands for the others of its devices, and
        those that it meets across islands for others that meet.
        """
        columns, groups = self.program.columns, self.program.groups
        used, first = np.unique(columns.group, return_index=True)
        found: dict[int, tuple[tuple[int, ...], ...]] = {}
        for group, row in zip(used.tolist(), first.tolist(), strict=True):
            if group == NONE:
                continue
            found[group] = (groups[group],)
            kind, stage = int(columns.kind[row]), self.plan.stages[int(columns.stage[row])]
            if self.plan.island and KEPT_REPLICA in self.program.meta and kind in _BY_ISLAND:
                replicas = [copy.ranks for copy in stage.replicas]
                parts = islands_of(replicas, self.plan.island)
                parts = counterparts_of(parts) if kind == REDUCE_ACROSS else parts
                lane = next(ranks.index(groups[group][0]) for ranks in replicas if groups[group][0] in ranks)
                alike = {twin for rank in groups[group] for twin in self.twins.get(rank, ())}
                others = (tuple(replicas[replica][lane] for replica in part) for part in parts)
                mine = set(groups[group])
                found[group] += tuple(one for one in others if alike.issuperset(one) and set(one) != mine)
        return found

    @cached_property
    def group_links(self) -> tuple[tuple[int, ...], ...]:
        """By group of the program, the links of all nodes that its collectives span, rising.

        A group that stands for others has those of the one that spans most.
        """
        spanned = (
            max(map(self._links_of_ring, self.twin_groups.get(index, (group,))), key=len)
            for index, group in enumerate(self.program.groups)
        )
        return tuple(tuple(sorted(self._link_number(link) for link in links)) for links in spanned)

    @cached_property
    def lanes_of_group(self) -> Ints:
        """By group of the program, how many collectives of equal lanes run in step on a link, itself one.

        Those of groups that it stands for count, too.
        """
        return self._in_step(lanes=True)

    @cached_property
    def flows_of_group(self) -> Ints:
        """By group of the program, how many collectives each simulated one of it stands for on a link.

        Those of the lanes and islands that are folded away run in step with it; where others meet them the
        simulator finds out.
        """
        return self._in_step(lanes=KEPT_LANE in self.program.meta)

    def _in_step(self, *, lanes: bool) -> Ints:
        """Most collectives on one link among those that a group stands for, with or without their `lanes`."""
        flows = np.ones(len(self.program.groups), dtype=np.int64)
        columns = self.program.columns
        tied = set(columns.group[columns.kind == REDUCE_TIED].tolist())
        replicas = [copy.ranks for stage in self.plan.stages for copy in stage.replicas]
        lanes_of = {rank: ranks for ranks in replicas for rank in ranks}
        # Copies of tied weights on context ranks are all in one group.
        shares_of = {
            rank: group
            for ranks in replicas
            for group in tensor_groups_of(ranks, self.plan.context_parallel)
            for rank in group
        }
        for group, twins in self.twin_groups.items():
            alike: list[Sequence[int]] = list(twins)
            if lanes:
                of = shares_of if group in tied else lanes_of
                alike = [ranks for twin in twins for ranks in zip(*(of[rank] for rank in twin), strict=False)]
            sharing = Counter(link for ranks in alike for link in self._links_of_ring(ranks))
            flows[group] = max(sharing.values(), default=1)
        return flows

    @cached_property
    def users_of_group(self) -> Ints:
        """By group of the program, how many groups use one of its links, if all are at work at once."""
        users = Counter(link for links in self.group_links for link in links)
        most = [max((users[link] for link in links), default=1) for links in self.group_links]
        return np.array(most, dtype=np.int64)

    def _links_of_ring(self, ranks: Sequence[int]) -> frozenset[_NodeLink]:
        """The links of the nodes on a ring over the ranks; each node is entered and left once."""
        ring = sorted(ranks)
        hops = zip(ring, [*ring[1:], ring[0]], strict=True)
        return frozenset(link for hop in hops for link in self._links_between(*hop))

    def message_s(self, rank: int, peer: int, sent_bytes: int) -> tuple[float, float]:
        """(occupancy, latency) of a message, of the twins' slowest.

        Twins run in step, so that their messages share links; where others meet them the simulator finds out.
        """
        pairs = list(zip(self.twins[rank], self.twins[peer], strict=True))
        used = [self._links_between(*pair) for pair in pairs]
        sharing = Counter(link for links in used for link in links)
        # Of the pairs between the same groups of nodes one will do.
        alike: dict[tuple[int, int, int], tuple[int, int]] = {}
        for pair, links in zip(pairs, used, strict=True):
            flows = max((sharing[link] for link in links), default=0)
            alike.setdefault((self._nodes[pair[0]][0], self._nodes[pair[1]][0], flows), pair)
        return max(
            (
                self.network.message_s(*pair, sent_bytes, max(1, flows))
                for (_, _, flows), pair in alike.items()
            ),
            key=sum,
        )

    @cached_property
    def links(self) -> Ints:
        """Numbers of the two links that each message between nodes occupies, else -1: (instructions, 2).

        The messages of a rank's twins are one flow here, with as large a share as that of any other rank, on
        the links of the first of them that leaves its node.
        """
        columns = self.program.columns
        links = np.full((len(columns), 2), NONE, dtype=np.int64)
        sends = np.flatnonzero(is_send(columns.kind))
        ranks, peers = columns.rank[sends], columns.peer[sends]
        first, which = distinct_rows(ranks, peers)
        table = np.full((len(first), 2), NONE, dtype=np.int64)
        for index, (rank, peer) in enumerate(zip(ranks[first].tolist(), peers[first].tolist(), strict=True)):
            pairs = zip(self.twins[rank], self.twins[peer], strict=True)
            used = next(filter(None, (self._links_between(*pair) for pair in pairs)), ())
            if used:
                table[index] = [self._link_number(link) for link in used]
        links[sends] = table[which]
        return links

    @cached_property
    def _node_numbers(self) -> Mapping[tuple[int, int], int]:
        return {node: number for number, node in enumerate(dict.fromkeys(self._nodes))}

    def _link_number(self, link: _NodeLink) -> int:
        node, group, leaves = link
        return 2 * (self._node_numbers[node] * len(self.cluster.groups) + group) + leaves

    def _links_between(self, rank: int, peer: int) -> tuple[_NodeLink, ...]:
        """By which link a message leaves its node and by which it enters another; none inside a node.

        A node has one link in each direction for every group of nodes it talks to.
        """
        here, there = self._nodes[rank], self._nodes[peer]
        if here == there:
            return ()
        return (here, there[0], True), (there, here[0], False)
