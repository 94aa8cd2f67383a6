"""Sums of gradients on two levels: inside nodes, then between nodes, then back the same way.

With n replicas, p on each node, a rank sends (n - p) / (n p) of its gradient to other nodes. This is for one
reduce-scatter; a flat exchange sends p times as much. Sums are in the order of ranks inside each node, then
in that of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.methods.hierarchical.options import NAME, HierarchicalOptions
from weft.run.transport.rank_order import PIECE_ELEMENTS
from weft.sync.base import Group, Meeting, SynchroniserOf
from weft.sync.dense import Dense


class HierarchicalSums(Dense):
    """The sums of `Dense` in two levels; weights that several stages share are summed in one."""

    def __init__(self, options: HierarchicalOptions) -> None:
        self._per_node = options.replicas_per_node

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        if not self._has_levels(meeting):
            super().reduce(gradient, meeting)
            return
        shares = gradient.view(meeting.group.size, -1)
        for piece in _pieces(shares):
            self._spread(self._sum(piece, meeting.group), piece, meeting.group)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        if not self._has_levels(meeting):
            return super().reduce_scatter(gradient, meeting)
        shares = gradient.view(meeting.group.size, -1)
        return torch.cat([self._sum(piece, meeting.group) for piece in _pieces(shares)])

    def _has_levels(self, meeting: Meeting) -> bool:
        # A shared weight meets over other ranks than those of a stage.
        return meeting.stage >= 0 and 1 < self._per_node < meeting.group.size

    def _levels(self, group: Group) -> tuple[range, range]:
        """Return the places of this rank's node, and of the ranks with its place on all nodes."""
        first = group.place - group.place % self._per_node
        node = range(first, first + self._per_node)
        return node, range(group.place - first, group.size, self._per_node)

    def _sum(self, shares: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the sum of this rank's share, shape (n,), over the group; `shares`, shape (ranks, n)."""
        node, twins = self._levels(group)
        # The j-th rank of a node adds up the shares of the j-th ranks of all nodes.
        given = shares.view(len(twins), len(node), -1).transpose(0, 1)
        of_node = _added_up(_exchanged(given, group, node))
        return _added_up(_exchanged(of_node, group, twins))

    def _spread(self, share: torch.Tensor, shares: torch.Tensor, group: Group) -> None:
        """Fill `shares`, shape (ranks, n), from every rank's share, between nodes first."""
        node, twins = self._levels(group)
        of_twins = _exchanged(share.expand(len(twins), -1), group, twins)
        by_place = _exchanged(of_twins.expand(len(node), *of_twins.shape), group, node)
        shares.view(len(twins), len(node), -1).copy_(by_place.transpose(0, 1))


def _pieces(shares: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of the same range of all shares, which bound the memory of an exchange."""
    pieces: Sequence[torch.Tensor] = shares.split(-(-PIECE_ELEMENTS // len(shares)), dim=1)
    return pieces


def _exchanged(given: torch.Tensor, group: Group, places: Sequence[int]) -> torch.Tensor:
    """Return the parts that the members at `places` give this rank; `given`, shape (places, ...)."""
    given = given.contiguous()
    taken = torch.empty_like(given)
    group.exchange(taken.view(-1), given.view(-1), places)
    return taken


def _added_up(addends: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, in its order."""
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


PARTS = (SynchroniserOf(name=NAME, make=HierarchicalSums),)
