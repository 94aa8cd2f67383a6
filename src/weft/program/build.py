"""From a layout and a schedule to a Program.

One pipeline is lowered with devices in place of ranks; every pipeline and tensor lane is a copy of it with
its own ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation, nearest
from weft.program.kinds import FORWARD, is_collective
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, lower, renumber
from weft.program.passes import PassList
from weft.program.program import NONE, Columns, Edges, Ints, Obligations, Program
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, Schedule, placements


def build_training_program(
    layout: PipelineLayout,
    schedule: Schedule,
    options: Options,
    *,
    methods: Mapping[str, Any] | None = None,
    only_replica: int | None = None,
) -> Program:
    """The program of one optimizer step, or of the cycle of steps that methods ask for, repeated.

    `methods` says by name what is asked of each method (`weft.program.passes.Pass`).
    `only_replica` keeps the instructions of the pipeline of one replica, on all of its paths (identical
    pipelines are folded into one for planning); groups keep all ranks, and `kept_replica` names the replica.

    Raises:
        InputError: when the layout is broken, the schedule cannot run it, its order is incomplete, a method
            does not go with it, or pipelines with unequal shares of the batch would meet otherwise.
    """
    layout.require_valid()
    passes = PassList.of(methods or {}, layout, trains=True)
    pipelines: dict[int, LoweredPipeline] = {}
    for micro_batches in dict.fromkeys(layout.pipeline_micro_batches):
        orders = _schedule_orders(layout, schedule, options, micro_batches)
        lowered = lower(layout, orders, micro_batches, schedule.name, trains=True)
        pipelines[micro_batches] = passes.apply(lowered, layout)
    _require_one_sequence(pipelines)
    program = _assemble(layout, pipelines, passes, "train", only_replica)
    return replace(program, schedule=schedule.name)


def build_evaluation_program(layout: PipelineLayout, *, methods: Mapping[str, Any] | None = None) -> Program:
    """The program that runs every micro-batch forward, stage by stage, and changes nothing.

    Replicas that share out their weights, or the stepping of them, gather them.

    Raises:
        InputError: when the layout is broken, or a method does not go with it.
    """
    layout.require_valid()
    passes = PassList.of(methods or {}, layout, trains=False)
    pipelines: dict[int, LoweredPipeline] = {}
    for micro_batches in dict.fromkeys(layout.pipeline_micro_batches):
        orders = [
            _forward_order(layout.placement == device, micro_batches // layout.paths)
            for device in range(int(layout.placement.max()) + 1)
        ]
        lowered = lower(layout, orders, micro_batches, "evaluation", trains=False)
        pipelines[micro_batches] = passes.apply(lowered, layout)
    return _assemble(layout, pipelines, passes, "evaluate")


def _require_one_sequence(pipelines: Mapping[int, LoweredPipeline]) -> None:
    """Refuse pipelines, by their number of micro-batches, whose devices would wait for different collectives.

    Raises:
        InputError: when a device of one has other collectives, or in another order, than the same device of
            another: buffers may change hands at other places where the shares of the batch differ.
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
    """(device, iteration, kind, stage, part) of the collectives, in the order in which they are issued."""
    columns = pipeline.columns
    rows = np.flatnonzero(is_collective(columns.kind))
    names = ("rank", "iteration", "kind", "stage", "part")
    return np.stack([getattr(columns, name)[rows] for name in names], axis=1)


def _forward_order(here: npt.NDArray[np.bool_], micro_batches: int) -> ComputeOrder:
    """Forwards of the stages that are here, shape (paths, stages), stage by stage; each path has so many."""
    stages, paths = np.nonzero(here.T)
    number = np.arange(micro_batches, dtype=np.int64)
    return ComputeOrder(
        kind=np.full(len(stages) * micro_batches, FORWARD, dtype=np.int64),
        stage=np.repeat(stages, micro_batches),
        micro_batch=(paths[:, None] * micro_batches + number).ravel(),
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
    wanted = placements(schedule, pipeline)
    # The schedule may number its devices in another order than the stages first use them.
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
    return [_without_frozen(order, layout.frozen_stages) for order in orders]


def _without_frozen(order: ComputeOrder, frozen_stages: int) -> ComputeOrder:
    """The order without the backwards that no gradient reaches."""
    kept = (order.kind == FORWARD) | (order.stage >= frozen_stages)
    return ComputeOrder(*(column[kept] for column in order))


def _assemble(
    layout: PipelineLayout,
    pipelines: dict[int, LoweredPipeline],
    passes: PassList,
    purpose: str,
    only_replica: int | None = None,
) -> Program:
    """Copy each replica's pipeline to its ranks and micro-batches."""
    kept = _kept_pipelines(layout, only_replica)
    ranks = layout.rank_table()
    meetings = passes.groups(layout)
    parts: list[Columns] = []
    edges: list[Edges] = []
    first_row = 0
    for pipeline in kept:
        lowered = pipelines[layout.pipeline_micro_batches[pipeline]]
        for lane in range(ranks.shape[2]):
            copy = _copy(layout, lowered.columns, ranks[..., lane], pipeline)
            parts.append(replace(copy, group=meetings.of(copy, lane)))
            shifted = lowered.edges.source + first_row, lowered.edges.target + first_row
            edges.append(replace(lowered.edges, source=shifted[0], target=shifted[1]))
            first_row += len(lowered.columns)
    columns = Columns.join(parts)
    order = np.argsort(columns.rank, kind="stable")
    meets = is_collective(columns.kind).any()
    return Program(
        ranks=layout.ranks,
        steps_per_cycle=passes.steps_per_cycle,
        columns=columns.take(order),
        edges=renumber(Edges.join(edges), order),
        groups=meetings.groups if meets else (),
        kin=meetings.kin if meets else None,
        obligations=_obligations(layout, purpose, kept, passes),
        kept_replica=only_replica,
    )


def _kept_pipelines(layout: PipelineLayout, only_replica: int | None) -> Sequence[int]:
    """All of them, or that of one replica.

    Raises:
        InputError: when there is no such replica.
    """
    if only_replica is None:
        return range(layout.pipelines)
    last = layout.replicas - 1
    if not 0 <= only_replica <= last:
        near = str(min(max(only_replica, 0), last))
        raise InputError(Violation("only_replica", f"{only_replica} is not one of 0..{last}", near))
    return (only_replica // layout.paths,)


def _copy(layout: PipelineLayout, columns: Columns, ranks: Ints, pipeline: int) -> Columns:
    """The rows of a pipeline in one lane; `ranks` of (pipeline, device)."""
    micro_batch, first_replica = columns.micro_batch, pipeline * layout.paths
    first = layout.first_micro_batch[first_replica]
    return replace(
        columns,
        rank=ranks[pipeline, columns.rank],
        peer=np.where(columns.peer == NONE, NONE, ranks[pipeline, columns.peer]),
        micro_batch=np.where(micro_batch == NONE, NONE, micro_batch + first),
        replica=first_replica + columns.replica,
    )


def _obligations(
    layout: PipelineLayout, purpose: str, pipelines: Sequence[int], methods: PassList
) -> Obligations:
    stages = np.arange(len(layout.stages), dtype=np.int64)
    paths = range(layout.paths)
    replicas = [pipeline * layout.paths + path for pipeline in pipelines for path in paths]
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
    passes, steps = (_in_each_step(rows, methods.steps_per_cycle) for rows in (passes, steps))
    backward, steps = (rows[rows[:, 0] >= layout.frozen_stages] for rows in (passes, steps))
    return Obligations(
        purpose=purpose,
        stage_edges=layout.edges,
        forward=passes,
        backward=backward if trains else passes[:0],
        step=steps if trains else steps[:0],
        owners={
            (stage, replica): layout.stages[stage].replicas[replica]
            for stage in range(len(stages))
            for replica in replicas
        },
        methods=methods.owed(layout),
    )


def _in_each_step(rows: Ints, steps: int) -> Ints:
    """The rows once for each step of a cycle, whose number is their last column."""
    iteration = np.repeat(np.arange(steps, dtype=np.int64), len(rows))
    return np.concatenate([np.tile(rows, (steps, 1)), iteration[:, None]], axis=1)


def _product(stages: Ints, replica: int, first: int, micro_batches: int) -> Ints:
    """Rows (stage, replica, micro-batch) of one pipeline, shape (stages * micro-batches, 3)."""
    length = len(stages) * micro_batches
    return np.stack(
        [
            np.repeat(stages, micro_batches),
            np.full(length, replica, dtype=np.int64),
            np.tile(np.arange(first, first + micro_batches, dtype=np.int64), len(stages)),
        ],
        axis=1,
    )
