"""The comparison of all nodes' clocks with rank 0's, by messages there and back."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from weft.run.launch.nodes import JobNodes
from weft.run.record.clocks import ClockComparison, NodeClocks
from weft.training.coordination.agreement import gather, meeting_peers

_ROUNDS = 20


def compare_clocks(nodes: JobNodes) -> NodeClocks:
    """Return one comparison of each node; every rank calls it.

    Half the time of a message there and back bounds the error of an offset (Cristian, Probabilistic clock
    synchronization, 1989). The quickest of some rounds counts.
    """
    found: dict[int, ClockComparison] = {}
    with meeting_peers():
        for leader, *_ in nodes.nodes[1:]:
            if nodes.rank == leader:
                found[leader] = min((_ask() for _ in range(_ROUNDS)), key=lambda one: one.error_ns)
            elif nodes.rank == 0:
                for _ in range(_ROUNDS):
                    _answer(leader)
    every = gather([[leader, *one] for leader, one in found.items()])
    return NodeClocks({int(leader): [ClockComparison(*one)] for each in every for leader, *one in each})


def joined(first: NodeClocks, then: NodeClocks) -> NodeClocks:
    """Return the comparisons of both, in their order."""
    return NodeClocks({rank: [*each, *then.comparisons[rank]] for rank, each in first.comparisons.items()})


def _ask() -> ClockComparison:
    told = torch.zeros(1, dtype=torch.int64)
    asked_ns = time.monotonic_ns()
    dist.send(told, 0)
    dist.recv(told, 0)
    heard_ns = time.monotonic_ns()
    middle_ns = (asked_ns + heard_ns) // 2
    return ClockComparison(middle_ns, int(told) - middle_ns, (heard_ns - asked_ns + 1) // 2)


def _answer(rank: int) -> None:
    asked = torch.zeros(1, dtype=torch.int64)
    dist.recv(asked, rank)
    dist.send(torch.tensor([time.monotonic_ns()]), rank)
