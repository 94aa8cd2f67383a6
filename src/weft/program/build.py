"""The build of a Program, or of the lowered pipelines for its parts, from a layout and a schedule.

One pipeline is lowered with devices in place of ranks. Every pipeline and tensor lane is a copy of it with
its own ranks and micro-batches (`weft.program.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from weft.errors import InputError, Violation, nearest
from weft.program.arrays import Ints
from weft.program.assemble import LoweredLayout, PipelineWork, assemble, pipeline_works
from weft.program.kinds import COMPUTATIONS, FORWARD, is_any_of, is_collective
from weft.program.lanes import over_lanes
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, lower
from weft.program.passes import PassList
from weft.program.program import NONE, Program
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, Schedule, deals, placements
from weft.program.splits import split_order


def build_training_program(
    layout: PipelineLayout,
    schedule: Schedule,
    options: Options,
    *,
    methods: Mapping[str, Any] | None = None,
    only_replica: int | None = None,
) -> Program:
    """Build the program of one optimizer step, or of the cycle of steps that methods need.

    `methods` holds the options of each method by name (`weft.program.passes.Pass`). `only_replica` keeps the
    instructions of one replica's pipeline, on all of its paths: planning folds identical pipelines into one.
    Then groups keep all ranks, and `kept_replica` names the replica.

    Raises:
        InputError: when the layout is broken, the schedule cannot run it, its order is incomplete, a method
            does not fit it, or the collectives of pipelines with unequal shares of the batch differ.
    """
    return assemble(lowered_training(layout, schedule, options, methods), only_replica)


def build_evaluation_program(layout: PipelineLayout, *, methods: Mapping[str, Any] | None = None) -> Program:
    """Build the program that runs every micro-batch forward, stage by stage, and changes nothing.

    Replicas that shard their weights or optimizer steps gather the weights.

    Raises:
        InputError: when the layout is broken, or a method does not fit it.
    """
    return assemble(lowered_evaluation(layout, methods))


def lowered_training(
    layout: PipelineLayout, schedule: Schedule, options: Options, methods: Mapping[str, Any] | None = None
) -> LoweredLayout:
    """Return the lowered pipelines of `build_training_program`, the input of `assemble_part`.

    Raises:
        InputError: as `build_training_program` does.
    """
    layout.require_valid()
    passes = PassList.of(methods or {}, layout, trains=True)
    taken = passes.taken(layout)
    pipelines: dict[PipelineWork, LoweredPipeline] = {}
    for work in dict.fromkeys(pipeline_works(layout, taken)):
        orders = _schedule_orders(layout, schedule, options, work.micro_batches)
        lowered = lower(layout.of_lanes(work.lanes), orders, work.micro_batches, schedule.name, trains=True)
        pipelines[work] = passes.apply(lowered, layout, work.taken)
    for steps in dict.fromkeys(taken):
        same = {work.micro_batches: one for work, one in pipelines.items() if work.taken == steps}
        _require_one_sequence(same)
    return LoweredLayout(
        layout=layout,
        passes=passes,
        taken=taken,
        pipelines=_in_places(pipelines, layout),
        beside=passes.beside(next(iter(pipelines.values())), layout),
        purpose="train",
        schedule=schedule.name,
    )


def lowered_evaluation(layout: PipelineLayout, methods: Mapping[str, Any] | None = None) -> LoweredLayout:
    """Return the lowered pipelines of `build_evaluation_program`, as `lowered_training` does."""
    layout.require_valid()
    passes = PassList.of(methods or {}, layout, trains=False)
    taken = passes.taken(layout)
    pipelines: dict[PipelineWork, LoweredPipeline] = {}
    for work in dict.fromkeys(pipeline_works(layout, taken)):
        each = work.micro_batches // layout.paths
        orders = [
            split_order(_forward_order(layout, device, each), layout.splits)
            for device in range(int(layout.placement.max()) + 1)
        ]
        of_lanes = layout.of_lanes(work.lanes)
        lowered = lower(of_lanes, orders, work.micro_batches, "evaluation", trains=False)
        pipelines[work] = passes.apply(lowered, layout, work.taken)
    return LoweredLayout(
        layout=layout,
        passes=passes,
        taken=taken,
        pipelines=_in_places(pipelines, layout),
        beside=passes.beside(next(iter(pipelines.values())), layout),
        purpose="evaluate",
    )


def _in_places(
    pipelines: dict[PipelineWork, LoweredPipeline], layout: PipelineLayout
) -> dict[PipelineWork, LoweredPipeline]:
    """Return pipelines over places: over devices, or over all lanes if stages have unlike numbers of them."""
    if not layout.mixes_lanes:
        return pipelines
    return {work: over_lanes(one, layout, work.lanes) for work, one in pipelines.items()}


def _require_one_sequence(pipelines: Mapping[int, LoweredPipeline]) -> None:
    """Check that each device has the same sequence of collectives in all pipelines, by their micro-batches.

    Pipelines with other shares of the batch may change the stages of buffers at other positions.
    """
    sequences = {
        count: _collectives(pipeline).tolist() for count, pipeline in sorted(pipelines.items(), reverse=True)
    }
    if len({tuple(map(tuple, sequence)) for sequence in sequences.values()}) > 1:
        counts = ", ".join(str(count) for count in sequences)
        problem = (
            f"in this order of micro-batches, replicas that share out gradients or weights meet in another "
            f"sequence for each share of the batch ({counts} micro-batches); "
            "equal shares or zero-1 are possible"
        )
        raise InputError(Violation("sharding", problem, "zero-1"))


def _collectives(pipeline: LoweredPipeline) -> Ints:
    """Return rows (device, iteration, kind, stage, part) of the collectives, in the order of their issue."""
    columns = pipeline.columns
    rows = np.flatnonzero(is_collective(columns.kind))
    names = ("rank", "iteration", "kind", "stage", "part")
    return np.stack([getattr(columns, name)[rows] for name in names], axis=1)


def _forward_order(layout: PipelineLayout, device: int, micro_batches: int) -> ComputeOrder:
    """Return `micro_batches` forwards per path of the stages on a device, stage by stage."""
    here = layout.placement == device
    parts = [
        (stage, _in_turn(layout, np.flatnonzero(here[:, stage]), micro_batches))
        for stage in np.flatnonzero(here.any(axis=0)).tolist()
    ]
    stage = np.repeat([one for one, _ in parts], [len(numbers) for _, numbers in parts])
    kind = np.full(len(stage), FORWARD, dtype=np.int64)
    return ComputeOrder(kind, stage, np.concatenate([numbers for _, numbers in parts]))


def _in_turn(layout: PipelineLayout, paths: Ints, each: int) -> Ints:
    """Return the micro-batches of some paths, `each` of them, in the order in which the paths take turns."""
    mine = layout.turns[np.isin(layout.turns, paths)]
    return (mine * each + np.arange(each, dtype=np.int64)[:, None]).ravel()


def _schedule_orders(
    layout: PipelineLayout, schedule: Schedule, options: Options, micro_batches: int
) -> list[ComputeOrder]:
    """Return the compute order of each device, devices as in `layout.placement`."""
    # Replicas that deal have the same order, so the devices of one path stand for all.
    placement = layout.placement[:1] if layout.deals else layout.placement
    devices = int(placement.max()) + 1
    copies = layout.copies if layout.deals else None
    places = tuple(placement[0].tolist())
    pipeline = Pipeline(devices, len(layout.stages), micro_batches, layout.edges, copies, places)
    problems = [
        Violation(
            f"schedule.options.{option}",
            f"{schedule.name} has no such option; it has {', '.join(sorted(schedule.options)) or 'none'}",
            nearest(option, schedule.options),
        )
        for option in options
        if option not in schedule.options
    ]
    reason = schedule.refuse(pipeline, options)
    if reason is not None:
        problems.append(Violation("schedule", reason))
    if layout.deals and not deals(schedule):
        counts = "+".join(str(len(stage.replicas)) for stage in layout.stages)
        problem = f"{schedule.name} needs equally many replicas of every stage, not {counts}"
        problems.append(Violation("schedule", problem, "1f1b"))
    if problems:
        raise InputError(problems)
    wanted = placements(schedule, pipeline)
    # The schedule may number devices in another order than that of their first use by stages.
    device_of = np.full(devices, NONE, dtype=np.int64)
    if wanted.shape == placement.shape:
        device_of[placement] = wanted
    if len(np.unique(device_of)) != devices or not np.array_equal(device_of[placement], wanted):
        named = [" and ".join(str(path) for path in table.tolist()) for table in (wanted, placement)]
        raise InputError(
            Violation(
                "layout",
                f"{schedule.name} places stages 0.. on devices {named[0]}, "
                f"but their ranks place them on {named[1]}",
            )
        )
    orders = [schedule.order(pipeline, int(device), options) for device in device_of]
    if layout.deals:
        orders = _dealt(layout, orders, micro_batches)
    return [split_order(_without_frozen(order, layout.frozen_stages), layout.splits) for order in orders]


def _dealt(layout: PipelineLayout, orders: Sequence[ComputeOrder], micro_batches: int) -> list[ComputeOrder]:
    """Return the order of each device from that of a replica of its stages, with numbers of the pipeline."""
    dealt = []
    for device in range(int(layout.placement.max()) + 1):
        paths, stages = np.nonzero(layout.placement == device)
        order = orders[layout.placement[0, stages[0]]]
        own = _in_turn(layout, np.unique(paths), micro_batches // layout.paths)
        dealt.append(order._replace(micro_batch=own[order.micro_batch]))
    return dealt


def _without_frozen(order: ComputeOrder, frozen_stages: int) -> ComputeOrder:
    """Return the order without the backwards of frozen stages, which no gradient reaches."""
    kept = (order.kind == FORWARD) | (order.stage >= frozen_stages)
    return ComputeOrder(*(column[kept] for column in order))


def program_orders(program: Program) -> list[ComputeOrder]:
    """Return the computations of each rank in order; micro-batches count over the global batch."""
    columns, wanted = program.columns, is_any_of(program.columns.kind, COMPUTATIONS)
    rows = [
        np.flatnonzero(wanted[start:end]) + start for start, end in pairwise(program.rank_starts.tolist())
    ]
    return [ComputeOrder(columns.kind[mine], columns.stage[mine], columns.micro_batch[mine]) for mine in rows]
