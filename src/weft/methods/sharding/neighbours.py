"""The replicas of a stage that are neighbours on a node, which some ways to agree add up first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from math import gcd

from weft.describe.cluster import Cluster
from weft.describe.plan import Stage


def replicas_per_node(stages: Sequence[Stage], cluster: Cluster) -> int:
    """Return the number of neighbours, in rank order, in each part of a stage's replicas inside one node.

    It is the largest number for all stages. The replicas of a stage meet lane by lane. It is 1 where some
    replicas are not neighbours on their node, or lanes are in different orders.
    """
    runs: list[int] = []
    for stage in stages:
        copies = sorted(replica.ranks for replica in stage.replicas)
        for lane in zip(*copies, strict=True):
            nodes = [cluster.node_of(rank) for rank in lane]
            lengths = [len(list(run)) for _, run in groupby(nodes)]
            ordered = all(one < other for one, other in pairwise(lane))
            runs += lengths if ordered and len(lengths) == len(set(nodes)) else [1]
    return gcd(*runs)
