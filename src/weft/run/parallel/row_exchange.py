"""Exchanges of rows among ranks: each with each, or inside nodes first, then between them.

In two levels, each rank gives the ranks of its node the rows for their twins. Twins are the ranks with one
place on all nodes. Then twins exchange. So a rank sends one message to each other node. Nie et al. call it
hierarchical (HetuMoE, arXiv 2203.14685). Hwang et al. call it 2DH (Tutel, arXiv 2206.03382).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weft.sync.base import Group

# Numbers of rows, (senders, receivers).
Sent = Sequence[Sequence[int]]


def exchanged(rows: torch.Tensor, sent: Sent, group: Group, per_node: int = 1) -> torch.Tensor:
    """Return the rows that all ranks of a group send to this one, sorted by sender.

    Args:
        rows: of this rank, sorted by receiver, (rows, hidden).
        sent: how many each rank sends to each.
        per_node: neighbours in the group on each node, which exchange first; 1: all exchange at once.
    """
    if per_node in (1, group.size):
        return _from_all(rows, [one[group.place] for one in sent], sent[group.place], group)
    node, own = divmod(group.place, per_node)
    mates, twins = range(node * per_node, (node + 1) * per_node), range(own, group.size, per_node)
    return _to_twins(_to_mates(rows, sent, group, mates, twins), sent, group, mates, twins)


def _to_mates(rows: torch.Tensor, sent: Sent, group: Group, mates: range, twins: range) -> torch.Tensor:
    """Return the rows of a node's ranks for the twins of this one, sorted by sender, then by twin."""
    own = sent[group.place]
    # The rows for each rank of the node and its twins, who lie as far apart as there are ranks on a node.
    lines = [range(place, group.size, len(mates)) for place in range(len(mates))]
    by_line = _reordered(rows, own, (place for line in lines for place in line))
    given = [sum(own[place] for place in line) for line in lines]
    taken = [sum(sent[mate][twin] for twin in twins) for mate in mates]
    return _from_some(by_line, taken, given, mates, group)


def _to_twins(rows: torch.Tensor, sent: Sent, group: Group, mates: range, twins: range) -> torch.Tensor:
    """Return the rows for this rank, sorted by sender, from those that its twins have from their nodes."""
    lengths = [sent[mate][twin] for mate in mates for twin in twins]
    turns = (mate * len(twins) + twin for twin in range(len(twins)) for mate in range(len(mates)))
    by_twin = _reordered(rows, lengths, turns)
    given = [sum(sent[mate][twin] for mate in mates) for twin in twins]
    nodes = (sent[first : first + len(mates)] for first in range(0, group.size, len(mates)))
    taken = [sum(one[group.place] for one in node) for node in nodes]
    return _from_some(by_twin, taken, given, twins, group)


def _reordered(rows: torch.Tensor, lengths: Sequence[int], order: Iterable[int]) -> torch.Tensor:
    parts = rows.split(list(lengths))
    return torch.cat([parts[place] for place in order])


def _from_some(
    rows: torch.Tensor, taken: Sequence[int], given: Sequence[int], places: Sequence[int], group: Group
) -> torch.Tensor:
    """Return the rows that ranks at some places of a group give each other; the other ranks get none."""
    both = ([0] * group.size, [0] * group.size)
    for numbers, some in zip(both, (taken, given), strict=True):
        for place, number in zip(places, some, strict=True):
            numbers[place] = number
    return _from_all(rows, *both, group)


def _from_all(rows: torch.Tensor, taken: Sequence[int], given: Sequence[int], group: Group) -> torch.Tensor:
    received = rows.new_empty(sum(taken), rows.shape[1])
    group.all_to_all_rows(received, rows.contiguous(), taken, given)
    return received
