"""The space of homogeneous layouts: degrees, micro-batches, schedule, loops, sharding, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from weft.describe.cluster import Cluster
from weft.describe.plan import RECOMPUTES, Recompute, Sharding
from weft.moves.job import Job
from weft.moves.layout import Layout, replicas_of
from weft.moves.sharding import island_on_nodes
from weft.planning.problem import Pins, Problem
from weft.predict.cost.memory import SHARDINGS
from weft.program.kinds import BACKWARD_INPUT
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import Pipeline

# With one device in line and one stage all orders compute the same things; 1f1b keeps the least.
SINGLE_DEVICE_SCHEDULE = "1f1b"
# With several stages each micro-batch goes through all of them, or all micro-batches through each. What
# replicas exchange of a stage then runs beside the computations of others.
SINGLE_DEVICE_LOOPED = ("depth-first", "breadth-first")
MAX_LOOPS = 8


def layouts(problem: Problem) -> Iterator[Layout]:
    """Every layout to consider, restricted by the user's pins; variants of a layout follow each other.

    Context ranks are considered when they are pinned.
    On a cluster of synchronous devices, such as CPUs, tensor ranks, which meet often, sharded states and
    recomputation, which save memory that such a machine rarely lacks, and backwards in two parts, which no
    profile measures, are considered when they are pinned.
    """
    job, pins = problem.job, problem.pins
    opened = overlaps(job.cluster)
    for tensor_parallel in _tensor_degrees(job.cluster, pins, opened=opened):
        width = tensor_parallel * pins.context_parallel
        for pipeline_parallel, data_parallel in _meshes(job.cluster.ranks, width, pins):
            for micro_batch_size in _micro_batch_sizes(job, data_parallel, pins):
                mesh = pipeline_parallel, data_parallel
                for schedule, loops in _orders(job, mesh, pins, opened=opened):
                    layout = Layout(
                        pipeline_parallel=pipeline_parallel,
                        data_parallel=data_parallel,
                        tensor_parallel=tensor_parallel,
                        context_parallel=pins.context_parallel,
                        loops=loops,
                        micro_batch_size=micro_batch_size,
                        schedule=schedule,
                        sync=pins.sync,
                    )
                    yield from _variants(problem, layout, opened=opened)


def overlaps(cluster: Cluster) -> bool:
    """Whether any device computes beside its host and its messages, as accelerators do."""
    return any(not group.device.synchronous for group in cluster.groups)


def _variants(problem: Problem, layout: Layout, *, opened: bool) -> Iterator[Layout]:
    """The layout with every sharding and recomputation that the model knows; without replicas there is nobody
    to share with."""
    job, pins = problem.job, problem.pins
    shardings = SHARDINGS
    recomputes: tuple[Recompute | tuple[Recompute, ...], ...] = tuple(
        one for one in RECOMPUTES if one != "selective" or job.graph.knows_products
    )
    if pins.sharding is not None:
        shardings = (pins.sharding,)
    elif pins.island is not None:
        shardings = shardings[1:]
    elif replicas_of(layout) == 1 or not opened:
        shardings = shardings[:1]
    if pins.recompute is not None:
        recomputes = (pins.recompute,)
    elif not opened:
        recomputes = recomputes[:1]
    for recompute in recomputes:
        if not isinstance(recompute, str) and len(recompute) != layout.stages:
            continue
        for sharding in shardings:
            for island in _islands(problem, layout, sharding, opened=opened):
                yield replace(layout, sharding=sharding, island=island).recomputing(recompute)


def _islands(problem: Problem, layout: Layout, sharding: Sharding, *, opened: bool) -> tuple[int | None, ...]:
    """All replicas together, and those of a node for themselves, which hold more and never less.

    Only gathers that come again and again are worth an all-reduce across islands: those of zero-3.
    """
    if problem.pins.island is not None:
        return (problem.pins.island,)
    if not opened or sharding != "zero-3" or problem.minimise == "memory":
        return (None,)
    island = island_on_nodes(problem.job.cluster, layout)
    return (None,) if island is None else (None, island)


def _tensor_degrees(cluster: Cluster, pins: Pins, *, opened: bool) -> Iterator[int]:
    """Powers of two that divide the devices of every node, or the pinned degree."""
    if pins.tensor_parallel is not None:
        yield pins.tensor_parallel
        return
    degree = 1
    while all(group.devices % degree == 0 for group in cluster.groups):
        yield degree
        degree *= 2
        if not opened:
            return


def _meshes(ranks: int, width: int, pins: Pins) -> Iterator[tuple[int, int]]:
    """(pp, dp) with pp x dp x `width` = ranks; fewer ranks only when the user pins both degrees.

    The width is how many ranks a replica of a stage has: cp x tp.
    """
    if pins.pipeline_parallel is not None and pins.data_parallel is not None:
        yield pins.pipeline_parallel, pins.data_parallel
        return
    if ranks % width:
        return
    places = ranks // width
    for pipeline_parallel in range(1, places + 1):
        if places % pipeline_parallel:
            continue
        data_parallel = places // pipeline_parallel
        if pins.pipeline_parallel in (None, pipeline_parallel) and pins.data_parallel in (
            None,
            data_parallel,
        ):
            yield pipeline_parallel, data_parallel


def _micro_batch_sizes(job: Job, data_parallel: int, pins: Pins) -> Iterator[int]:
    """Powers of two that divide one replica's share of the batch, or the pinned size."""
    if pins.micro_batch_size is not None:
        yield pins.micro_batch_size
        return
    size = 1
    while size * data_parallel <= job.global_batch:
        if job.global_batch % (size * data_parallel) == 0:
            yield size
        size *= 2


def _orders(job: Job, mesh: tuple[int, int], pins: Pins, *, opened: bool) -> Iterator[tuple[str, int]]:
    """Schedules and how many stages each device has, for pp x dp."""
    pipeline_parallel, data_parallel = mesh
    # A device that has nobody to exchange with gains nothing by turning from stage to stage.
    turns = pipeline_parallel > 1 or (opened and data_parallel > 1)
    # With one stage they do what another schedule does.
    looped = SINGLE_DEVICE_LOOPED if pipeline_parallel == 1 and pins.schedule is None else ()
    for schedule in _schedules(pipeline_parallel, pins, opened=opened):
        least = 2 if schedule in looped else 1
        if pins.loops is not None:
            if pins.loops >= least:
                yield schedule, pins.loops
            continue
        if least == 1:
            yield schedule, 1
        for loops in _loops(job, pipeline_parallel, schedule) if turns else ():
            yield schedule, loops


def _schedules(pipeline_parallel: int, pins: Pins, *, opened: bool) -> Iterator[str]:
    if pins.schedule is not None:
        yield get_schedule(pins.schedule).name
    elif pipeline_parallel == 1:
        yield SINGLE_DEVICE_SCHEDULE
        yield from SINGLE_DEVICE_LOOPED
    else:
        yield from (name for name in SCHEDULES if opened or not splits_backward(name, pipeline_parallel))


@cache
def splits_backward(name: str, pipeline_parallel: int) -> bool:
    """Whether a schedule computes backwards in two parts."""
    schedule = get_schedule(name)
    probes = (Pipeline(pipeline_parallel, loops * pipeline_parallel, pipeline_parallel) for loops in (1, 2))
    return any(
        BACKWARD_INPUT in schedule.order(probe, 0, {}).kind
        for probe in probes
        if schedule.refuse(probe, {}) is None
    )


def _loops(job: Job, pipeline_parallel: int, schedule: str) -> Iterator[int]:
    """The powers of two that the schedule can loop and the model has layers for."""
    loops = 2
    while loops <= MAX_LOOPS and loops * pipeline_parallel <= len(job.graph.layers):
        looped = Pipeline(pipeline_parallel, loops * pipeline_parallel, pipeline_parallel)
        if get_schedule(schedule).refuse(looped, {}) is None:
            yield loops
        loops *= 2
