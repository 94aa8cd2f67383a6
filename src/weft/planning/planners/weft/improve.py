"""Small changes of a layout, each judged by the simulator, as long as one of them is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.moves.layout import Layout, shares_of
from weft.planning.problem import Problem
from weft.program.schedules import SCHEDULES


def neighbours(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """Other orders with one stage per device; a layer moved over each cut; a micro-batch given to another
    replica. What is pinned stays."""
    if problem.pins.schedule is None and layout.loops == 1 and layout.pipeline_parallel > 1:
        for name in SCHEDULES:
            if name != layout.schedule:
                yield replace(layout, schedule=name, options={})
    yield from _moved_layers(layout)
    yield from _moved_micro_batches(problem, layout)


def _moved_layers(layout: Layout) -> Iterator[Layout]:
    counts = layout.layers_per_stage
    if counts is None:
        return
    for giver in range(len(counts)):
        for taker in (giver - 1, giver + 1):
            if 0 <= taker < len(counts) and counts[giver] > 1:
                yield replace(layout, layers_per_stage=_moved(counts, giver, taker))


def _moved_micro_batches(problem: Problem, layout: Layout) -> Iterator[Layout]:
    if layout.micro_batches_per_replica is None:
        return
    shares = shares_of(problem.job, layout)
    # Replicas with equal shares are alike: one of each stands for all.
    kinds = sorted({share: place for place, share in enumerate(shares)}.items())
    for share, giver in kinds:
        for _, taker in kinds:
            if giver != taker and share > 1:
                yield replace(layout, micro_batches_per_replica=_moved(shares, giver, taker))


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (place == giver) + (place == taker) for place, count in enumerate(counts))
