"""The space of homogeneous layouts: degrees, micro-batches, schedule, loops, sharding, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import lcm

from weft.describe.cluster import Cluster
from weft.describe.layout import DENSE, Layout, PartialLayout
from weft.describe.plan import RECOMPUTES, Recompute
from weft.moves.job import Job
from weft.moves.schedules import schedules_within
from weft.moves.sharers import sharings
from weft.planning.problem import Problem
from weft.program.kinds import BACKWARD_INPUT
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import Options, Pipeline, Schedule, searched_options

# With one device in line and one stage all orders compute the same things; 1f1b keeps the least.
SINGLE_DEVICE_SCHEDULE = "1f1b"
# With several stages each micro-batch goes through all of them, or all micro-batches through each. What
# replicas exchange of a stage then runs beside the computations of others. Of weft's own orders the others do
# the same or less well.
SINGLE_DEVICE = (SINGLE_DEVICE_SCHEDULE, "depth-first", "breadth-first")
MAX_LOOPS = 8
# What is tried one after the other where it is left open, beside `sharings`; everything else is as pinned.
_SEARCHED = {"schedule", "loops", "pp", "dp", "tp", "micro_batch_size", "recompute"}


def layouts(problem: Problem) -> Iterator[Layout]:
    """Every layout to consider, restricted by the user's pins; variants of a layout follow each other.

    Context ranks are considered when they are pinned.
    On a cluster of synchronous devices, such as CPUs, tensor ranks, which meet often, sharded states and
    recomputation, which save memory that such a machine rarely lacks, and backwards in two parts, which no
    profile measures, are considered when they are pinned.
    """
    job, pins = problem.job, problem.pins
    opened = overlaps(job.cluster)
    unsearched = pins.besides(_SEARCHED)
    for tp in _tensor_degrees(job.cluster, pins, opened=opened):
        for pp, dp in meshes(job.cluster.ranks, pins.replaced(tp=tp).width, pins):
            for micro_batch_size in _micro_batch_sizes(job, dp, pins):
                mesh = pp, dp
                for schedule, options, loops in _orders(problem, mesh, opened=opened):
                    layout = Layout(
                        pp=pp,
                        dp=dp,
                        tp=tp,
                        loops=loops,
                        micro_batch_size=micro_batch_size,
                        schedule=schedule,
                        options=options,
                        sync=problem.sync or DENSE,
                        **unsearched,
                    )
                    yield from _variants(problem, layout, opened=opened)


def overlaps(cluster: Cluster) -> bool:
    """Whether any device computes beside its host and its messages, as accelerators do."""
    return any(not group.device.synchronous for group in cluster.groups)


def _variants(problem: Problem, layout: Layout, *, opened: bool) -> Iterator[Layout]:
    """The layout with everything that replicas may share out and every recomputation that the model knows."""
    job, pins = problem.job, problem.pins
    if layout.splits and len(layout.splits) != layout.stages:
        return
    memory = problem.minimise == "memory"
    shared = list(sharings(job.cluster, layout, pins, opened=opened, lightest=memory))
    recomputes: tuple[Recompute | tuple[Recompute, ...], ...] = tuple(
        one for one in RECOMPUTES if one != "selective" or job.graph.knows_products
    )
    if pins.recompute is not None:
        recomputes = (pins.recompute,)
    elif not opened:
        recomputes = recomputes[:1]
    for recompute in recomputes:
        if not isinstance(recompute, str) and len(recompute) != layout.stages:
            continue
        yield from (one.recomputing(recompute) for one in shared)


def _tensor_degrees(cluster: Cluster, pins: PartialLayout, *, opened: bool) -> Iterator[int]:
    """Powers of two that divide the devices of every node, or the pinned degree."""
    if pins.tp is not None:
        yield pins.tp
        return
    degree = 1
    while all(group.devices % degree == 0 for group in cluster.groups):
        yield degree
        degree *= 2
        if not opened:
            return


def meshes(ranks: int, width: int, pins: PartialLayout) -> Iterator[tuple[int, int]]:
    """(pp, dp) with pp x dp x `width` = ranks, rising in pp; fewer ranks only when both degrees are pinned.

    The width is how many ranks a replica of a stage has.
    """
    if pins.pp is not None and pins.dp is not None:
        yield pins.pp, pins.dp
        return
    if ranks % width:
        return
    places = ranks // width
    for pp in range(1, places + 1):
        if places % pp:
            continue
        dp = places // pp
        if pins.pp in (None, pp) and pins.dp in (None, dp):
            yield pp, dp


def _micro_batch_sizes(job: Job, dp: int, pins: PartialLayout) -> Iterator[int]:
    """Powers of two, or of what stages split them in, that divide a replica's share of the batch; or the
    pinned size."""
    if pins.micro_batch_size is not None:
        yield pins.micro_batch_size
        return
    size = lcm(*(pins.splits or ()))
    while size * dp <= job.global_batch:
        if job.global_batch % (size * dp) == 0:
            yield size
        size *= 2


def _orders(problem: Problem, mesh: tuple[int, int], *, opened: bool) -> Iterator[tuple[str, Options, int]]:
    """Schedules, their options and how many stages each device has, for pp x dp."""
    pins, (pp, dp) = problem.pins, mesh
    # A device that has nobody to exchange with gains nothing by turning from stage to stage.
    turns = pp > 1 or (opened and dp > 1)
    alone = pp == 1 and pins.schedule is None
    for schedule in _schedules(problem, pp, opened=opened):
        # With one stage they do what another schedule does.
        least = 2 if alone and schedule.name != SINGLE_DEVICE_SCHEDULE else 1
        for options in searched_options(schedule):
            if pins.loops is not None:
                if pins.loops >= least:
                    yield schedule.name, options, pins.loops
                continue
            if least == 1:
                yield schedule.name, options, 1
            for loops in _loops(problem.job, pp, schedule, options) if turns else ():
                yield schedule.name, options, loops


def _schedules(problem: Problem, pp: int, *, opened: bool) -> Iterator[Schedule]:
    if problem.pins.schedule is not None:
        yield get_schedule(problem.pins.schedule)
        return
    known = SCHEDULES if pp > 1 else SINGLE_DEVICE
    for schedule in schedules_within(problem.contract):
        if schedule.name in SCHEDULES and schedule.name not in known:
            continue
        if opened or not splits_backward(schedule.name, pp):
            yield schedule


@cache
def splits_backward(name: str, pp: int) -> bool:
    """Whether a schedule computes backwards in two parts, as far as short pipelines show."""
    schedule = get_schedule(name)
    probes = (Pipeline(pp, loops * pp, pp) for loops in (1, 2))
    return any(
        BACKWARD_INPUT in schedule.order(probe, 0, options).kind
        for probe, options in product(probes, searched_options(schedule))
        if schedule.refuse(probe, options) is None
    )


def _loops(job: Job, pp: int, schedule: Schedule, options: Options) -> Iterator[int]:
    """The powers of two that the schedule can loop and the model has layers for."""
    loops = 2
    while loops <= MAX_LOOPS and loops * pp <= len(job.graph.layers):
        looped = Pipeline(pp, loops * pp, pp)
        if schedule.refuse(looped, options) is None:
            yield loops
        loops *= 2
