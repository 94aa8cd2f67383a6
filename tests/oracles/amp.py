"""AMP's formulas written out loop by loop (Li et al., arXiv 2210.07297), slow and without weft's own code.

Bandwidths are in bytes/s, what is sent and reduced in bytes, times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple


class Case(NamedTuple):
    """One model on one cluster; `inside` and `between` are each node's bandwidths, tables are by tp."""

    nodes: Sequence[int]
    inside: Sequence[float]
    between: Sequence[float]
    global_batch: int
    forward_s: dict[int, Sequence[float]]
    sent: dict[int, Sequence[float]]
    gradients: dict[int, Sequence[float]]
    embedding: dict[int, float]
    embedding_layers: Sequence[int]


def node_of(case: Case, rank: int) -> int:
    node = 0
    while rank >= case.nodes[node]:
        rank -= case.nodes[node]
        node += 1
    return node


def bandwidth(case: Case, rank: int, other: int) -> float:
    node, other_node = node_of(case, rank), node_of(case, other)
    if node == other_node:
        return case.inside[node]
    return min(case.between[node], case.between[other_node])


def strategies(case: Case) -> Iterator[tuple[int, int, int, int]]:
    """(tp, dp, pp, micro-batch size)."""
    ranks = sum(case.nodes)
    for tp in range(1, ranks + 1):
        if any(count % tp for count in case.nodes) or tp not in case.forward_s:
            continue
        for dp in range(1, ranks // tp + 1):
            if ranks % (tp * dp) or case.global_batch % dp:
                continue
            for size in range(1, case.global_batch // dp + 1):
                if case.global_batch // dp % size == 0:
                    yield tp, dp, ranks // (tp * dp), size


def rank_of(stage: int, replica: int, lane: int, tp: int, dp: int) -> int:
    return lane + tp * replica + tp * dp * stage


def boundary_s(case: Case, tp: int, dp: int, size: int, stage: int, layer: int) -> float:
    """From `stage` to the next one when it ends with `layer`."""
    total = 0.0
    for replica in range(dp):
        slowest = float("inf")
        for lane in range(tp):
            here, there = (rank_of(one, replica, lane, tp, dp) for one in (stage, stage + 1))
            slowest = min(slowest, bandwidth(case, here, there))
        total += size * case.sent[tp][layer] / slowest
    return total / dp


def step_s(case: Case, tp: int, dp: int, pp: int, size: int, ends: Sequence[int]) -> float:
    """Of the stages that end before the layers `ends`; the last of them is the number of layers."""
    micro_batches = case.global_batch // (dp * size)
    layer_s = [3 * size * seconds for seconds in case.forward_s[tp]]
    starts = [0, *ends[:-1]]
    stage_s = [sum(layer_s[start:end]) for start, end in zip(starts, ends, strict=True)]
    total = sum(layer_s) + (micro_batches - 1) * max(stage_s)
    for stage in range(pp - 1):
        total += boundary_s(case, tp, dp, size, stage, ends[stage] - 1)
    slowest = 0.0
    for stage in range(pp):
        held = range(starts[stage], ends[stage])
        reduced = sum(case.gradients[tp][layer] for layer in held)
        if any(layer in held for layer in case.embedding_layers):
            reduced += case.embedding[tp]
        for lane in range(tp):
            ring = [rank_of(stage, replica, lane, tp, dp) for replica in range(dp)]
            if dp > 1:
                links = [bandwidth(case, ring[d], ring[(d + 1) % dp]) for d in range(dp)]
                slowest = max(slowest, 2 * (dp - 1) / (dp * min(links)) * reduced)
    return total + slowest


def pipeline_s(case: Case, tp: int, dp: int, pp: int, size: int, ends: Sequence[int]) -> float:
    """`step_s` without the all-reduce: what the stages are chosen by."""
    alone = case._replace(gradients={tp: [0.0] * len(case.forward_s[tp])}, embedding={tp: 0.0})
    return step_s(alone, tp, dp, pp, size, ends)


def best_stages(case: Case, tp: int, dp: int, pp: int, size: int) -> tuple[float, list[int]]:
    """Least `pipeline_s` of all cuts into stages that hold a layer each, and the cuts."""
    layers = len(case.forward_s[tp])
    every = ([*cuts, layers] for cuts in combinations(range(1, layers), pp - 1))
    return min((pipeline_s(case, tp, dp, pp, size, ends), ends) for ends in every)
