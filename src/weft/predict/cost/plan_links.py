"""What joins the ranks of a plan: the groups that meet, the links that they use, and messages.

As `PlacedPlan`, it does not depend on how many micro-batches a program of the plan runs.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Those of a rank to a peer, for which those of all twins stand, too.

    Attributes:
        kinds: of each kind that may take longest a (rank, peer), and how many flows share its links.
        links: numbers of the two links of the first that leaves its node, else -1.
    """

    kinds: tuple[tuple[int, int, int], ...]
    links: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PlanLinks:
    """Tables of groups and messages, made when first asked for.

    `program` is any program of the plan; `twins` are as in `PlacedPlan`.
    """

    program: Program
    network: Network
    twins: Mapping[int, Ints]

    @cached_property
    def twin_groups(self) -> Mapping[int, Groups]:
        """By group that the program uses, the ranks of all groups that it stands for, itself first."""
        groups = self.program.groups
        return {group: tuple(groups[one] for one in twins) for group, twins in self._twins_of_group.items()}

    @cached_property
    def _twins_of_group(self) -> Mapping[int, tuple[int, ...]]:
        """By group that the program uses, the groups that it stands for, itself first.

        Where one replica is simulated in place of all, its group stands for what the twins of its ranks do in
        other replicas, such as other groups of sharers.
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
        """How each of `twin_groups` lies on nodes; those that do in the same way take the same time."""
        places = self.network.places
        return {
            group: tuple(dict.fromkeys(places.spread_of(ranks) for ranks in twins))
            for group, twins in self.twin_groups.items()
        }

    @cached_property
    def group_links(self) -> tuple[tuple[int, ...], ...]:
        """By group of the program, the links of all nodes that its collectives span, rising.

        A group that stands for others has those of the one that spans most.
        """
        rings = [self.twin_groups.get(index, (group,)) for index, group in enumerate(self.program.groups)]
        ring, link = self.network.places.links_of_rings([one for twins in rings for one in twins])
        count = np.bincount(ring, minlength=sum(map(len, rings)))
        ends = np.cumsum(count)
        spanned, first = [], 0
        for twins in rings:
            # Of several that span as many, the first.
            most = first + int(np.argmax(count[first : first + len(twins)]))
            spanned.append(tuple(link[ends[most] - count[most] : ends[most]].tolist()))
            first += len(twins)
        return tuple(spanned)

    @cached_property
    def lanes_of_group(self) -> Ints:
        """By group of the program, how many collectives of equal lanes run in step on a link, itself one.

        Those of groups that it stands for count, too.
        """
        return self._in_step(lanes=True)

    @cached_property
    def flows_of_group(self) -> Ints:
        """By group of the program, how many collectives each simulated one of it stands for on a link.

        Those of the lanes and replicas that are folded away run in step with it; where others meet them the
        simulator finds out.
        """
        return self._in_step(lanes=self.program.kept_lane is not None)

    def _in_step(self, *, lanes: bool) -> Ints:
        """Most collectives on one link among those that a group stands for, with or without their `lanes`."""
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
        """By group of the program, how many groups use one of its links, if all are at work at once."""
        users = np.bincount(np.array([link for links in self.group_links for link in links], dtype=np.int64))
        return np.array(
            [int(users[list(links)].max()) if links else 1 for links in self.group_links], dtype=np.int64
        )

    def message_s(self, rank: int, peer: int, sent_bytes: int) -> tuple[float, float]:
        """(occupancy, latency) of a message, of the twins' slowest.

        Twins run in step, so that their messages share links; where others meet them the simulator finds out.
        """
        kinds = self.messages[rank, peer].kinds
        return max(
            (self.network.message_s(here, there, sent_bytes, flows) for here, there, flows in kinds), key=sum
        )

    @cached_property
    def messages(self) -> Mapping[tuple[int, int], Messages]:
        """By (rank, peer)."""
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
        # Of the pairs between the same groups of nodes one will do.
        alike = codes(places.group[here], places.group[there], flows, crosses.astype(np.int64))
        kinds = np.sort(np.unique(alike, return_index=True)[1])
        columns = (column[kinds].tolist() for column in (here, there, flows))
        return Messages(tuple(zip(*columns, strict=True)), links)
