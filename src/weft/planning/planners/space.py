"""Spaces of homogeneous layouts: by all choices (`layouts`), or by degrees alone (`degree_layouts`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import gcd, lcm

from weft.describe.cluster import Cluster
from weft.describe.job import Job
from weft.describe.layout import DENSE, Layout, PartialLayout
from weft.describe.loss_choice import ANY_LOSS
from weft.describe.plan import RECOMPUTES, Recompute
from weft.errors import InputError, Violation
from weft.moves.composition import fixed_cut, goes_forward_first
from weft.moves.partition import uniform_partition
from weft.moves.schedules import schedules_within
from weft.moves.sharers import sharings
from weft.planning.problem import Problem
from weft.program.schedules import SCHEDULES, get_schedule, splits_backward
from weft.program.schedules.base import (
    Options,
    Pipeline,
    Schedule,
    is_for_graphs,
    searched_options,
    takes_places,
)
from weft.program.schedules.ring import divisors

# With one device in line and one stage all orders compute the same; 1f1b keeps the least. A method may need
# all forward passes first.
SINGLE_DEVICE_SCHEDULE, FORWARD_FIRST_SCHEDULE = "1f1b", "gpipe"
# With several stages each micro-batch runs through all of them, or all micro-batches through each. The
# exchanges of replicas for a stage then overlap the computations of others. Weft's other orders do the same
# or worse.
SINGLE_DEVICE = (SINGLE_DEVICE_SCHEDULE, "depth-first", "breadth-first")
MAX_LOOPS = 8
# Choices to try one after the other where they are open, like `sharings`; all others are as pinned.
_SEARCHED = {"schedule", "loops", "pp", "dp", "tp", "ep", "micro_batch_size", "recompute"}


def layouts(problem: Problem) -> Iterator[Layout]:
    """Yield every layout to consider, restricted by the user's pins; variants of a layout follow each other.

    Context ranks are considered when they are pinned, expert ranks for mixtures. On a cluster of synchronous
    devices, such as CPUs, some choices are considered only when pinned. Tensor ranks meet often. Sharded
    states and recomputation save memory that such a machine rarely lacks. No profile measures backwards in
    two parts.
    """
    job, pins = problem.job, problem.pins
    opened = overlaps(job.cluster)
    unsearched = pins.besides(_SEARCHED)
    for tp, ep in _degrees(job, pins, opened=opened):
        for pp, dp in meshes(job.stage_devices, pins.replaced(tp=tp, ep=ep).width, pins):
            for micro_batch_size in _micro_batch_sizes(job, dp, ep, pins):
                mesh = pp, dp
                for schedule, options, loops in _orders(problem, mesh, opened=opened):
                    layout = Layout(
                        pp=pp,
                        dp=dp,
                        tp=tp,
                        ep=ep,
                        loops=loops,
                        micro_batch_size=micro_batch_size,
                        schedule=schedule,
                        options=options,
                        sync=problem.sync or DENSE,
                        **unsearched,
                    )
                    yield from _variants(problem, layout, opened=opened)


def overlaps(cluster: Cluster) -> bool:
    """Return True if any device overlaps computation with its host and messages, as accelerators do."""
    return any(not group.device.synchronous for group in cluster.groups)


def _variants(problem: Problem, layout: Layout, *, opened: bool) -> Iterator[Layout]:
    """Yield the layout with every sharding of replicas and every recomputation that the model knows."""
    job, pins = problem.job, problem.pins
    if layout.splits and len(layout.splits) != layout.stages:
        return
    if (cut := fixed_cut(job)) is not None:
        if len(cut) != layout.stages:
            return
        layout = with_layers(layout, cut)
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
        for one in shared:
            yield from with_losses(problem, one.recomputing(recompute))


def with_losses(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with each loss to consider: chunks too where they are asked for or memory counts."""
    yield layout
    pinned = problem.pins.loss
    if pinned == ANY_LOSS or (pinned is None and problem.minimise == "memory"):
        yield in_chunks(problem, layout)


def in_chunks(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with a chunked loss."""
    return replace(layout, loss="chunked", loss_chunk_tokens=problem.pins.loss_chunk_tokens)


def _degrees(job: Job, pins: PartialLayout, *, opened: bool) -> Iterator[tuple[int, int]]:
    """Yield (tp, ep); of open expert degrees the powers of two that divide the experts and the cluster."""
    for tp in _tensor_degrees(job.cluster, pins, opened=opened):
        if pins.ep is not None:
            yield tp, pins.ep
            continue
        ep = 1
        yield tp, ep
        others = tp * (pins.cp or 1)
        while (
            opened
            and job.graph.experts % (2 * ep) == 0 < job.graph.experts
            and job.stage_devices % (2 * ep * others) == 0
        ):
            ep *= 2
            yield tp, ep


def _tensor_degrees(cluster: Cluster, pins: PartialLayout, *, opened: bool) -> Iterator[int]:
    """Yield the powers of two that divide the devices of every node, or the pinned degree."""
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
    """Yield (pp, dp) with pp x dp x `width` = ranks, rising in pp; fewer ranks only if both are pinned.

    The width is the number of ranks in a replica of a stage.
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


def _micro_batch_sizes(job: Job, dp: int, ep: int, pins: PartialLayout) -> Iterator[int]:
    """Yield the pinned size, or the sizes that divide a replica's share of the batch. These are powers of two
    times the splits of stages and the expert ranks, which divide the samples."""
    if pins.micro_batch_size is not None:
        yield pins.micro_batch_size
        return
    size = ep * lcm(*(pins.splits or ()))
    while size * dp <= job.global_batch:
        if job.global_batch % (size * dp) == 0:
            yield size
        size *= 2


def _orders(problem: Problem, mesh: tuple[int, int], *, opened: bool) -> Iterator[tuple[str, Options, int]]:
    """Yield schedules, their options and the number of stages per device, for pp x dp."""
    pins, (pp, dp) = problem.pins, mesh
    # A device without partners for exchange gains nothing from several stages.
    turns = pp > 1 or (opened and dp > 1)
    alone = pp == 1 and pins.schedule is None
    for schedule in _schedules(problem, pp, opened=opened):
        # With one stage they do the same as another schedule.
        least = 2 if alone and schedule.name != _alone(problem.job) else 1
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
    known = SCHEDULES if pp > 1 else (*SINGLE_DEVICE, _alone(problem.job))
    for schedule in schedules_within(problem.contract):
        if schedule.name in SCHEDULES and schedule.name not in known:
            continue
        if takes_places(schedule) or (is_for_graphs(schedule) and problem.job.graph.is_chain):
            continue
        if opened or not splits_backward(schedule.name, pp):
            yield schedule


def _alone(job: Job) -> str:
    """Return the order of one device with one stage."""
    return FORWARD_FIRST_SCHEDULE if goes_forward_first(job) else SINGLE_DEVICE_SCHEDULE


def _loops(job: Job, pp: int, schedule: Schedule, options: Options) -> Iterator[int]:
    """Yield the powers of two that the schedule can loop and the model has layers for."""
    loops = 2
    while loops <= MAX_LOOPS and loops * pp <= len(job.graph.layers):
        looped = Pipeline(pp, loops * pp, pp)
        if schedule.refuse(looped, options) is None:
            yield loops
        loops *= 2


# Orders with the step time of closed forms: forwards fill the pipeline, backwards drain it.
CLOSED_FORM_SCHEDULES = ("1f1b", "gpipe")


def degree_layouts(problem: Problem) -> Iterator[Layout]:
    """Yield every (tp, dp, pp, micro-batch size) over all devices, in rising order, restricted by the pins.

    Tensor ranks divide the devices of every node, micro-batches the samples of a replica. With pp and dp both
    pinned, fewer devices may be used. Other choices are as pinned, else the simplest: 1f1b, no sharding, no
    recomputation.
    """
    pins, batch = problem.pins, problem.job.global_batch
    on_every_node = gcd(*(group.devices for group in problem.job.cluster.groups))
    degrees = [pins.tp] if pins.tp is not None else divisors(on_every_node)
    besides = pins.besides(_SEARCHED)
    for tp in degrees:
        for pp, dp in reversed([*meshes(problem.job.stage_devices, tp, pins)]):
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
    """Refuse pins and goals that a planner with a closed form of the step time does not know.

    Raises:
        InputError: one line for each pin that it cannot honour, and for a goal other than time.
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
    if pins.ep not in (None, 1):
        problems.append(Violation("plan.ep", f"{planner} does not divide experts over {pins.ep} ranks", "1"))
    if problem.minimise != "time":
        problems.append(
            Violation("goal.minimise", f"{planner} minimises time, not {problem.minimise}", "time")
        )
    if problems:
        raise InputError(problems)


def beside_blocks(problem: Problem) -> tuple[int, int]:
    """Return the numbers of layers before the first and after the last block.

    Blocks are the layers of the majority's kind. Without a majority, all layers count as blocks.
    """
    kinds = [layer.kind for layer in problem.job.graph.layers]
    (block, count), *_ = Counter(kinds).most_common(1)
    return (kinds.index(block), kinds[::-1].index(block)) if 2 * count > len(kinds) else (0, 0)


def by_count(problem: Problem, layout: Layout) -> Layout:
    """Divide the blocks among stages by count; layers before and after them stay at the ends.

    Where a stage would have no layer, all layers are divided by count.
    """
    layers = len(problem.job.graph.layers)
    if layout.stages > layers:
        return layout
    counts = uniform_partition(layers, layout.stages, *beside_blocks(problem))
    counts = counts or uniform_partition(layers, layout.stages)
    assert counts is not None, "there are as many layers as stages"
    return with_layers(layout, counts)


def with_layers(layout: Layout, layers_per_stage: tuple[int, ...]) -> Layout:
    """Return the layout with these stages; one stage has all layers anyway."""
    return layout if layout.stages == 1 else replace(layout, layers_per_stage=layers_per_stage)
