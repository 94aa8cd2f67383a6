"""Small changes of a layout, each judged by the simulator, as long as one of them is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES
from weft.moves.layout import shares_of
from weft.moves.schedules import schedules_within
from weft.planning.problem import Problem
from weft.program.schedules.base import searched_options


def neighbours(
    problem: Problem, layout: Layout, lightest: Callable[[Layout], Layout | None]
) -> Iterator[Layout]:
    """Other orders; where stages recompute unlike each other, one that recomputes
    less; a layer moved over each cut; a micro-batch given to another replica. What is pinned stays.

    `lightest` gives stages that recompute unlike each other the least recomputation that fits.
    """
    if problem.pins.schedule is None and layout.stages > 1:
        for schedule in schedules_within(problem.contract):
            for options in searched_options(schedule):
                other = replace(layout, schedule=schedule.name, options=options)
                if other != layout:
                    yield other
    yield from _lighter(problem, layout)
    for moved in _moved_layers(layout):
        yield moved
        if layout.recompute_per_stage is not None and (again := lightest(moved)) is not None:
            yield again
    yield from _moved_micro_batches(problem, layout)


def _lighter(problem: Problem, layout: Layout) -> Iterator[Layout]:
    words = layout.recompute_per_stage
    if words is None or problem.pins.recompute is not None:
        return
    known = [one for one in RECOMPUTES if one != "selective" or problem.job.graph.knows_products]
    for stage, word in enumerate(words):
        for lighter in known[: known.index(word)]:
            yield layout.recomputing([*words[:stage], lighter, *words[stage + 1 :]])


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
