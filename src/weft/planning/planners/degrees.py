"""Layouts by their degrees alone, and the pins that planners of such layouts can honour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from weft.describe.layout import DENSE, Layout
from weft.describe.plan import RECOMPUTES
from weft.errors import InputError, Violation
from weft.moves.partition import uniform_partition
from weft.planning.planners.space import meshes
from weft.planning.problem import Problem
from weft.program.schedules import get_schedule

# Orders with the step time that closed forms give: forwards fill the pipeline, backwards drain it.
CLOSED_FORM_SCHEDULES = ("1f1b", "gpipe")
# What is chosen here; everything else is as pinned.
_BY_DEGREES = {"schedule", "loops", "pp", "dp", "tp", "micro_batch_size", "recompute"}


def degree_layouts(problem: Problem) -> Iterator[Layout]:
    """Every (tp, dp, pp, micro-batch size) over all devices, in rising order, restricted by the pins.

    Tensor ranks divide the devices of every node, micro-batches the samples of a replica. With pp and dp
    both pinned fewer devices may be used. What degrees do not say is as pinned, else the plainest: 1f1b,
    nothing shared out, nothing recomputed.
    """
    pins, batch = problem.pins, problem.job.global_batch
    degrees = [pins.tp] if pins.tp is not None else _tensor_degrees(problem)
    besides = pins.besides(_BY_DEGREES)
    for tp in degrees:
        for pp, dp in reversed([*meshes(problem.job.cluster.ranks, tp, pins)]):
            sizes = divisors(batch // dp) if batch % dp == 0 else []
            for size in sizes if pins.micro_batch_size is None else [pins.micro_batch_size]:
                yield Layout(
                    pp=pp,
                    dp=dp,
                    tp=tp,
                    loops=1,
                    micro_batch_size=size,
                    schedule=get_schedule(pins.schedule or CLOSED_FORM_SCHEDULES[0]).name,
                    sync=problem.sync or DENSE,
                    **besides,
                ).recomputing(pins.recompute or "none")


def require_closed_form(problem: Problem, planner: str) -> None:
    """Refuse what a planner with a closed form of the step time does not know.

    Raises:
        InputError: one line for each pin that it cannot honour, and when memory is to be minimised.
    """
    pins = problem.pins
    problems = []
    if pins.schedule is not None and get_schedule(pins.schedule).name not in CLOSED_FORM_SCHEDULES:
        known = " and ".join(CLOSED_FORM_SCHEDULES)
        problem_text = f"{planner} plans {known}, not {pins.schedule!r}"
        problems.append(Violation("plan.schedule", problem_text, CLOSED_FORM_SCHEDULES[0]))
    if pins.loops not in (None, 1):
        problems.append(
            Violation("plan.loops", f"{planner} gives each device one stage, not {pins.loops}", "1")
        )
    if not isinstance(pins.recompute, str | None):
        problem_text = f"{planner} recomputes alike in all stages, not {', '.join(pins.recompute)}"
        heaviest = max(pins.recompute, key=RECOMPUTES.index)
        problems.append(Violation("plan.recompute", problem_text, heaviest))
    if pins.cp not in (None, 1):
        problem_text = f"{planner} does not divide tokens over {pins.cp} ranks"
        problems.append(Violation("plan.cp", problem_text, "1"))
    if problem.minimise != "time":
        problems.append(
            Violation("goal.minimise", f"{planner} minimises time, not {problem.minimise}", "time")
        )
    if problems:
        raise InputError(problems)


def beside_blocks(problem: Problem) -> tuple[int, int]:
    """How many layers come before the first and after the last block.

    Blocks are the layers of the kind that most layers are of; without such a kind all layers count as blocks.
    """
    kinds = [layer.kind for layer in problem.job.graph.layers]
    (block, count), *_ = Counter(kinds).most_common(1)
    return (kinds.index(block), kinds[::-1].index(block)) if 2 * count > len(kinds) else (0, 0)


def by_count(problem: Problem, layout: Layout) -> Layout:
    """The layout with its blocks shared out by count; what comes before and after them stays at the ends.

    Where a stage would have no layer, all layers are shared out by count.
    """
    layers = len(problem.job.graph.layers)
    if layout.stages > layers:
        return layout
    counts = uniform_partition(layers, layout.stages, *beside_blocks(problem))
    counts = counts or uniform_partition(layers, layout.stages)
    assert counts is not None, "there are as many layers as stages"
    return with_layers(layout, counts)


def with_layers(layout: Layout, layers_per_stage: tuple[int, ...]) -> Layout:
    """The layout with these stages; one stage has all layers anyway."""
    return layout if layout.stages == 1 else replace(layout, layers_per_stage=layers_per_stage)


def divisors(number: int) -> list[int]:
    """Rising."""
    return [one for one in range(1, number + 1) if number % one == 0]


def _tensor_degrees(problem: Problem) -> list[int]:
    return divisors(gcd(*(group.devices for group in problem.job.cluster.groups)))
