"""The closed form of Metis (Um et al., USENIX ATC 2024) for equal devices, written out loop by loop.

AMP, Galvatron and Varuna have the same pipeline in theirs. Times in seconds, sizes in bytes, speeds in
bytes/s; ranks count tensor lanes first, then replicas, then stages, and fill one node after the other.
"""

from __future__ import annotations

from collections.abc import Sequence


def bandwidth(rank: int, other: int, devices: int, inside: float, between: float) -> float:
    return inside if rank // devices == other // devices else between


def step_s(
    layer_s: Sequence[float],
    sent: Sequence[float],
    gradients: Sequence[float],
    counts: Sequence[int],
    *,
    tp: int,
    dp: int,
    micro_batches: int,
    devices: int,
    inside: float,
    between: float,
) -> float:
    """Of stages with `counts` layers, whose micro-batches take `layer_s` forward and backward."""
    stages, first = [], 0
    for count in counts:
        stages.append(range(first, first + count))
        first += count
    stage_s = [sum(layer_s[layer] for layer in stage) for stage in stages]
    total = (micro_batches - 1) * max(stage_s) + sum(stage_s)
    for place, stage in enumerate(stages[:-1]):
        slowest = float("inf")
        for replica in range(dp):
            for lane in range(tp):
                here = (place * dp + replica) * tp + lane
                there = here + dp * tp
                slowest = min(slowest, bandwidth(here, there, devices, inside, between))
        total += sent[stage[-1]] / slowest
    longest = 0.0
    for place, stage in enumerate(stages):
        reduced = sum(gradients[layer] for layer in stage)
        for lane in range(tp):
            ring = [(place * dp + replica) * tp + lane for replica in range(dp)]
            for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
                speed = bandwidth(here, there, devices, inside, between)
                if dp > 1:
                    longest = max(longest, 2 * (dp - 1) / dp * reduced / speed)
    return total + longest
