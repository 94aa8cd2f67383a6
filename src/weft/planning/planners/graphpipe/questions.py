"""The choices that planners of partitions leave to their callers, and the problems that they refuse."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.layout import DENSE, Layout
from weft.errors import InputError, Violation
from weft.moves.composition import fixed_cut
from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.plans import SCHEDULE
from weft.planning.planners.space import degree_layouts
from weft.planning.problem import Problem
from weft.program.schedules import get_schedule
from weft.program.schedules.base import deals
from weft.program.schedules.ring import divisors


def partition_layouts(problem: Problem) -> Iterator[Layout]:
    """Return the degrees and sizes of micro-batches; partitions add the stages."""
    return (layout for layout in degree_layouts(problem) if layout.pp == 1 or problem.pins.pp is not None)


def require_partition(problem: Problem, name: str) -> None:
    """Refuse pins, goals and methods that a partition does not know; `name` is the planner's."""
    pins, known = problem.pins, []
    other = [
        ("loops", pins.loops not in (None, 1), "each device has one stage", "1"),
        ("cp", pins.cp not in (None, 1), "no ranks divide tokens", "1"),
        ("ep", pins.ep not in (None, 1), "no ranks divide experts", "1"),
        ("splits", pins.splits is not None, "stages do not split micro-batches", ""),
        ("recompute", not isinstance(pins.recompute, str | None), "stages come with the partition", ""),
    ]
    known += [
        Violation(f"plan.{pin}", f"{name} cannot keep it: {reason}", nearest)
        for pin, refused, reason, nearest in other
        if refused
    ]
    if problem.minimise != "time":
        known.append(Violation("goal.minimise", f"{name} minimises time, not {problem.minimise}", "time"))
    if fixed_cut(problem.job) is not None:
        known.append(Violation("planner", "a method of the job fixes the layers of stages", "weft"))
    if known:
        raise InputError(known)


def least_layout(problem: Problem, schedule: str = SCHEDULE) -> Layout:
    """Return the layout with the pinned choices and the least of all others."""
    pins = problem.pins
    return Layout(
        pp=pins.pp or 1,
        dp=pins.dp or 1,
        tp=pins.tp or 1,
        loops=1,
        micro_batch_size=pins.micro_batch_size or 1,
        schedule=get_schedule(pins.schedule or schedule).name,
        sync=problem.sync or DENSE,
    )


def degrees_of(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield (tp, dp): one tensor rank, unless more are pinned; replicas divide the places of stages."""
    job, pins = problem.job, problem.pins
    tp = pins.tp or 1
    for dp in [pins.dp] if pins.dp is not None else divisors(job.cluster.ranks // tp):
        if job.global_batch % dp == 0:
            yield tp, dp


def may_deal(problem: Problem) -> bool:
    """Return True if the stages of a job's plans may have unlike numbers of replicas."""
    pins = problem.pins
    order = pins.schedule is None or deals(get_schedule(pins.schedule))
    dense = (problem.sync or DENSE) == DENSE and pins.sharding in (None, "zero-0")
    return order and dense and pins.dp is None and pins.pp is None


def unlike_degrees(problem: Problem, costs: GraphCosts, size: int) -> tuple[int, ...]:
    """Return the numbers of replicas that share the batch's micro-batches of a size equally, rising."""
    micro_batches = problem.job.global_batch // size
    return tuple(degree for degree in range(1, costs.devices + 1) if micro_batches % degree == 0)


def sizes_of(problem: Problem, dp: int) -> list[int]:
    """Return the pinned size of micro-batches, or the powers of two that divide a replica's samples."""
    pinned, samples = problem.pins.micro_batch_size, problem.job.global_batch // dp
    sizes = [pinned] if pinned is not None else [2**turn for turn in range(samples.bit_length())]
    return [size for size in sizes if samples % size == 0]
