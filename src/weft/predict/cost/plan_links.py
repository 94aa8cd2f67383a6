"""Connections between the ranks of a plan: the groups that meet, their links, and messages.

As in `PlacedPlan`, they do not depend on the number of micro-batches of a program of the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.predict.cost.network import Network
from weft.predict.cost.places import Spread
from weft.program.arrays import Ints
from weft.program.codes import codes, distinct_rows
from weft.program.kinds import is_send
from weft.program.program import NONE, Groups, Program


class Messages(NamedTuple):
    """The messages of a rank to a peer; they also represent the messages of all twins.

    Attributes:
        kinds: for each kind that may take longest, (rank, peer, number of flows that share its links).
        links: numbers of the two links of the first message that leaves its node, else -1.
    """

    kinds: tuple[tuple[int, int, int], ...]
    links: tuple[int, int]


def sides_of(group: Sequence[int], servers: Collection[int]) -> tuple[list[int], list[int]]:
    """Return the ranks of a group with servers that send, which come first, and those that receive."""
    first = group[0] in servers
    return [rank for rank in group if (rank in servers) == first], [
        rank for rank in group if (rank in servers) != first
    ]


@dataclass(frozen=True, kw_only=True)
class PlanLinks:
    """Tables of groups and messages, built on first use.

    `program` is any program of the plan; `twins` are as in `PlacedPlan`. Ranks of a group
    exchange with its `servers` only, and not on a ring. Those that send come first in the group.
    """

    program: Program
    network: Network
    twins: Mapping[int, Ints]
    servers: frozenset[int] = frozenset()

    @cached_property
    def twin_groups(self) -> Mapping[int, Groups]:
        """By group that the program uses, the ranks of all groups that it stands for, itself first."""
        groups = self.program.groups
        return {group: tuple(groups[one] for one in twins) for group, twins in self._twins_of_group.items()}

    @cached_property
    def _twins_of_group(self) -> Mapping[int, tuple[int, ...]]:
        """By group that the program uses, the groups that it stands for, itself first.

        Where one replica is simulated for all, its group stands for the groups of its ranks' twins. They are
        in other replicas, such as other groups of sharers.
        """
        groups, kin = self.program.groups, self.program.kin
        used = np.unique(self.program.columns.group)
        found: dict[int, tuple[int, ...]] = {}
        for group in used[used != NONE].tolist():
            found[group] = (group,)
            if self.program.kept_replica is not None and kin is not None:
                alike = {
                    twin for rank in groups[group] if rank in self.twins for twin in self.twins[rank].tolist()
                }
                others = np.flatnonzero(kin.replicas == kin.replicas[group]).tolist()
                found[group] += tuple(one for one in others if one != group and alike.issuperset(groups[one]))
        return found

    @cached_property
    def spreads_of_group(self) -> Mapping[int, tuple[Spread, ...]]:
        """The distributions over nodes of `twin_groups`; equal ones take equal times and count once."""
        places = self.network.places
        return {
            group: tuple(dict.fromkeys(places.spread_of(ranks) for ranks in twins))
            for group, twins in self.twin_groups.items()
        }

    @cached_property
    def group_links(self) -> tuple[tuple[int, ...], ...]:
        """By group of the program, the links of all nodes that its collectives span, rising.

        A group that stands for several has the links of the one that spans most.
        """
        rings = [self.twin_groups.get(index, (group,)) for index, group in enumerate(self.program.groups)]
        ring, link = self.network.places.links_of_rings([one for twins in rings for one in twins])
        count = np.bincount(ring, minlength=sum(map(len, rings)))
        ends = np.cumsum(count)
        spanned, first = [], 0
        for twins in rings:
            # Among equal counts, the first group.
            most = first + int(np.argmax(count[first : first + len(twins)]))
            spanned.append(tuple(link[ends[most] - count[most] : ends[most]].tolist()))
            first += len(twins)
        for index, group in enumerate(self.program.groups):
            if not self.servers.isdisjoint(group):
                spanned[index] = self._links_to_servers(group)
        return tuple(spanned)

    def _links_to_servers(self, group: Sequence[int]) -> tuple[int, ...]:
        """Return the links between nodes on the ways from the ranks of a group that send, rising."""
        senders, receivers = sides_of(group, self.servers)
        here, there = np.repeat(senders, len(receivers)), np.tile(receivers, len(senders))
        crosses, *links = self.network.places.leaving_and_entering(here, there)
        return tuple(np.unique(np.concatenate([link[crosses] for link in links])).tolist())

    @cached_property
    def lanes_of_group(self) -> Ints:
        """By group of the program, the number of collectives of equal lanes in step on a link, with itself.

        Lanes of the groups that it stands for count, too.
        """
        return self._in_step(lanes=True)

    @cached_property
    def flows_of_group(self) -> Ints:
        """By group of the program, the collectives on a link that one simulated collective stands for.

        Collectives of folded lanes and replicas run in step with it. The simulator finds meetings with
        others.
        """
        return self._in_step(lanes=self.program.kept_lane is not None)

    def _in_step(self, *, lanes: bool) -> Ints:
        """Return the most collectives on one link among a group's twins, with or without their `lanes`."""
        groups, kin = self.program.groups, self.program.kin
        flows = np.ones(len(groups), dtype=np.int64)
        for group, twins in self._twins_of_group.items():
            alike: Ints = np.array(twins, dtype=np.int64)
            if lanes and kin is not None:
                alike = np.flatnonzero(np.isin(kin.lanes, kin.lanes[alike]))
            links = self.network.places.links_of_rings([groups[one] for one in alike.tolist()])[1]
            flows[group] = np.bincount(links).max(initial=1)
        return flows

    @cached_property
    def users_of_group(self) -> Ints:
        """By group of the program, the number of groups that use one of its links, if all work at once."""
        users = np.bincount(np.array([link for links in self.group_links for link in links], dtype=np.int64))
        return np.array(
            [int(users[list(links)].max()) if links else 1 for links in self.group_links], dtype=np.int64
        )

    def message_s(self, rank: int, peer: int, sent_bytes: int) -> tuple[float, float]:
        """Return (occupancy, latency), in seconds, of the slowest twin's message.

        Twins run in step, so that their messages share links. The simulator finds meetings with others.
        """
        kinds = self.messages[rank, peer].kinds
        return max(
            (self.network.message_s(here, there, sent_bytes, flows) for here, there, flows in kinds), key=sum
        )

    @cached_property
    def messages(self) -> Mapping[tuple[int, int], Messages]:
        """The messages by (rank, peer)."""
        columns = self.program.columns
        sends = np.flatnonzero(is_send(columns.kind))
        ranks, peers = columns.rank[sends], columns.peer[sends]
        first = distinct_rows(ranks, peers)[0]
        pairs = zip(ranks[first].tolist(), peers[first].tolist(), strict=True)
        return {pair: self._messages_of(*pair) for pair in pairs}

    def _messages_of(self, rank: int, peer: int) -> Messages:
        here, there, places = self.twins[rank], self.twins[peer], self.network.places
        crosses, leaving, entering = places.leaving_and_entering(here, there)
        flows = np.ones(len(here), dtype=np.int64)
        links = (NONE, NONE)
        if crosses.any():
            used = np.stack([leaving[crosses], entering[crosses]])
            links = int(used[0, 0]), int(used[1, 0])
            if len(here) > 1:
                flows[crosses] = np.bincount(used.ravel())[used].max(axis=0)
        # One pair between the same groups of nodes is enough.
        alike = codes(places.group[here], places.group[there], flows, crosses.astype(np.int64))
        kinds = np.sort(np.unique(alike, return_index=True)[1])
        columns = (column[kinds].tolist() for column in (here, there, flows))
        return Messages(tuple(zip(*columns, strict=True)), links)
