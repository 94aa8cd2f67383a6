"""From a layout and a schedule to a Program.

One pipeline is lowered with devices in place of ranks; every replica and tensor lane is a copy of it with its
own ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.errors import InputError, Violation, nearest
from weft.program.kinds import FORWARD, REDUCE
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, lower, renumber
from weft.program.program import NONE, Columns, Edges, Ints, Obligations, Program
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, Schedule


def build_training_program(
    layout: PipelineLayout, schedule: Schedule, options: Options, *, only_replica: int | None = None
) -> Program:
    """The program of one optimizer step, repeated.

    `only_replica` keeps the instructions of one pipeline replica (identical replicas are folded into one for
    planning); groups keep all ranks, and `meta["folded"]` names the replica.

    Raises:
        InputError: when the layout is broken, the schedule cannot run it, or its order is incomplete.
    """
    layout.require_valid()
    pipelines: dict[int, LoweredPipeline] = {}
    for micro_batches in dict.fromkeys(layout.micro_batches):
        orders = _schedule_orders(layout, schedule, options, micro_batches)
        pipelines[micro_batches] = lower(layout, orders, micro_batches, schedule.name, trains=True)
    return _assemble(layout, pipelines, "train", {"schedule": schedule.name}, only_replica)


def build_evaluation_program(layout: PipelineLayout) -> Program:
    """The program that runs every micro-batch forward, stage by stage, and changes nothing.

    Raises:
        InputError: when the layout is broken.
    """
    layout.require_valid()
    placement = layout.placement
    pipelines: dict[int, LoweredPipeline] = {}
    for micro_batches in dict.fromkeys(layout.micro_batches):
        orders = [
            _forward_order(np.flatnonzero(placement == device), micro_batches)
            for device in range(int(placement.max()) + 1)
        ]
        pipelines[micro_batches] = lower(layout, orders, micro_batches, "evaluation", trains=False)
    return _assemble(layout, pipelines, "evaluate", {})


def _forward_order(stages: Ints, micro_batches: int) -> ComputeOrder:
    return ComputeOrder(
        kind=np.full(len(stages) * micro_batches, FORWARD, dtype=np.int64),
        stage=np.repeat(stages, micro_batches),
        micro_batch=np.tile(np.arange(micro_batches, dtype=np.int64), len(stages)),
    )


def _schedule_orders(
    layout: PipelineLayout, schedule: Schedule, options: Options, micro_batches: int
) -> list[ComputeOrder]:
    """The compute order of each device, devices as in `layout.placement`."""
    placement = layout.placement
    devices = int(placement.max()) + 1
    pipeline = Pipeline(devices=devices, stages=len(layout.stages), micro_batches=micro_batches)
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
    if problems:
        raise InputError(problems)
    wanted = schedule.placement(pipeline)
    # The schedule may number its devices in another order than the stages first use them.
    device_of = np.full(devices, NONE, dtype=np.int64)
    device_of[placement] = wanted
    if len(np.unique(device_of)) != devices or not np.array_equal(device_of[placement], wanted):
        raise InputError(
            Violation(
                "layout",
                f"{schedule.name} places stages 0.. on devices {wanted.tolist()}, "
                f"but their ranks place them on {placement.tolist()}",
            )
        )
    return [schedule.order(pipeline, int(device), options) for device in device_of]


def _assemble(
    layout: PipelineLayout,
    pipelines: dict[int, LoweredPipeline],
    purpose: str,
    meta: dict[str, str],
    only_replica: int | None = None,
) -> Program:
    """Copy each replica's pipeline to its ranks and micro-batches."""
    replicas: Sequence[int] = range(layout.replicas)
    if only_replica is not None:
        if only_replica not in replicas:
            raise InputError(
                Violation(
                    "only_replica",
                    f"{only_replica} is not one of 0..{layout.replicas - 1}",
                    str(min(max(only_replica, 0), layout.replicas - 1)),
                )
            )
        replicas = (only_replica,)
        meta = {**meta, "folded": str(only_replica)}
    ranks = layout.rank_table()
    parts: list[Columns] = []
    edges: list[Edges] = []
    first_row = 0
    for replica in replicas:
        pipeline = pipelines[layout.micro_batches[replica]]
        for lane in range(ranks.shape[2]):
            parts.append(_copy(layout, pipeline.columns, ranks, replica, lane))
            shifted = pipeline.edges.source + first_row, pipeline.edges.target + first_row
            edges.append(replace(pipeline.edges, source=shifted[0], target=shifted[1]))
            first_row += len(pipeline.columns)
    columns = Columns.join(parts)
    order = np.argsort(columns.rank, kind="stable")
    groups: tuple[tuple[int, ...], ...] = ()
    if purpose == "train" and layout.replicas > 1:
        # Group of (device, lane), numbered as `_copy` does.
        groups = tuple(tuple(group) for group in ranks.reshape(layout.replicas, -1).T.tolist())
    return Program(
        ranks=layout.ranks,
        steps_per_cycle=1,
        columns=columns.take(order),
        edges=renumber(Edges.join(edges), order),
        groups=groups,
        obligations=_obligations(layout, purpose, replicas),
        meta=meta,
    )


def _copy(layout: PipelineLayout, columns: Columns, ranks: Ints, replica: int, lane: int) -> Columns:
    micro_batch = columns.micro_batch
    group = columns.rank * ranks.shape[2] + lane
    return replace(
        columns,
        rank=ranks[replica, columns.rank, lane],
        peer=np.where(columns.peer == NONE, NONE, ranks[replica, columns.peer, lane]),
        micro_batch=np.where(micro_batch == NONE, NONE, micro_batch + layout.first_micro_batch[replica]),
        replica=np.full(len(columns), replica, dtype=np.int64),
        group=np.where(columns.kind == REDUCE, group, NONE),
    )


def _obligations(layout: PipelineLayout, purpose: str, replicas: Sequence[int]) -> Obligations:
    stages = np.arange(len(layout.stages), dtype=np.int64)
    passes = np.concatenate(
        [
            _product(stages, replica, layout.first_micro_batch[replica], layout.micro_batches[replica])
            for replica in replicas
        ]
    )
    steps = np.stack(
        [np.tile(stages, len(replicas)), np.repeat(np.array(replicas, dtype=np.int64), len(stages))], axis=1
    )
    trains = purpose == "train"
    return Obligations(
        purpose=purpose,
        stage_edges=layout.edges,
        forward=passes,
        backward=passes if trains else passes[:0],
        step=np.pad(steps, ((0, 0), (0, 1))) if trains else np.zeros((0, 3), dtype=np.int64),
        owners={
            (stage, replica): layout.stages[stage].replicas[replica]
            for stage in range(len(stages))
            for replica in replicas
        },
    )


def _product(stages: Ints, replica: int, first: int, micro_batches: int) -> Ints:
    """Rows (stage, replica, micro-batch, iteration 0) of one pipeline, shape (stages * micro-batches, 4)."""
    length = len(stages) * micro_batches
    return np.stack(
        [
            np.repeat(stages, micro_batches),
            np.full(length, replica, dtype=np.int64),
            np.tile(np.arange(first, first + micro_batches, dtype=np.int64), len(stages)),
            np.zeros(length, dtype=np.int64),
        ],
        axis=1,
    )
