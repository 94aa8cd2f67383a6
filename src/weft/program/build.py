"""From a layout and a schedule to a Program.

One pipeline is lowered with devices in place of ranks; every pipeline and tensor lane is a copy of it with
its own ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weft.describe.plan import Blocking, Sharding
from weft.errors import InputError, Violation, nearest
from weft.program.groups import across_group_table, group_table, tied_group_table
from weft.program.kinds import (
    COLLECTIVES,
    FORWARD,
    NORM,
    REDUCE_ACROSS,
    REDUCE_TIED,
    is_any_of,
    is_collective,
)
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, lower, renumber
from weft.program.passes.blocking import block
from weft.program.passes.norm import norm_group, take_norm
from weft.program.passes.sharding import require_one_sequence, shard
from weft.program.passes.tying import tie
from weft.program.program import NONE, Columns, Edges, Ints, Obligations, Program
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, Schedule, placements


def build_training_program(
    layout: PipelineLayout,
    schedule: Schedule,
    options: Options,
    *,
    sharding: Sharding = "zero-0",
    blocking: Sequence[Blocking] = (),
    gradient_norm: bool = False,
    only_replica: int | None = None,
) -> Program:
    """The program of one optimizer step, repeated.

    `sharding` is what replicas share out, `blocking` which communication is not overlapped with computation,
    `gradient_norm` whether steps wait for the norm of the whole gradient.
    `only_replica` keeps the instructions of the pipeline of one replica, on all of its paths (identical
    pipelines are folded into one for planning); groups keep all ranks, and `meta["folded"]` names the
    replica.

    Raises:
        InputError: when the layout is broken, the schedule cannot run it, its order is incomplete, or
            pipelines with unequal shares of the batch would come to other collectives.
    """
    layout.require_valid()
    pipelines: dict[int, LoweredPipeline] = {}
    for micro_batches in dict.fromkeys(layout.pipeline_micro_batches):
        orders = _schedule_orders(layout, schedule, options, micro_batches)
        lowered = lower(layout, orders, micro_batches, schedule.name, trains=True)
        if layout.replicas > 1:
            lowered = shard(lowered, layout, sharding)
        if layout.tied:
            lowered = tie(lowered, layout)
        lowered = block(lowered, blocking, sharding)
        pipelines[micro_batches] = take_norm(lowered) if gradient_norm else lowered
    require_one_sequence(pipelines, sharding)
    meta = {"schedule": schedule.name, **_sharded(layout, sharding)}
    return _assemble(layout, pipelines, "train", meta, only_replica)


def build_evaluation_program(layout: PipelineLayout, *, sharding: Sharding = "zero-0") -> Program:
    """The program that runs every micro-batch forward, stage by stage, and changes nothing.

    Replicas that share out their weights, or the stepping of them, gather them.

    Raises:
        InputError: when the layout is broken.
    """
    layout.require_valid()
    pipelines: dict[int, LoweredPipeline] = {}
    for micro_batches in dict.fromkeys(layout.pipeline_micro_batches):
        orders = [
            _forward_order(layout.placement == device, micro_batches // layout.paths)
            for device in range(int(layout.placement.max()) + 1)
        ]
        lowered = lower(layout, orders, micro_batches, "evaluation", trains=False)
        pipelines[micro_batches] = shard(lowered, layout, sharding) if layout.replicas > 1 else lowered
    return _assemble(layout, pipelines, "evaluate", _sharded(layout, sharding))


def _sharded(layout: PipelineLayout, sharding: Sharding) -> dict[str, str]:
    """What the verifier must know of the states that replicas share out, if they do.

    Raises:
        InputError: for islands that share nothing out.
    """
    if sharding == "zero-0":
        if layout.island is not None:
            raise InputError(Violation("layout", "zero-0 shares nothing out in islands", "zero-1"))
        return {}
    islands = {"islands": str(layout.islands)} if layout.islands > 1 else {}
    return {"sharding": sharding, **islands} if layout.replicas > 1 else {}


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
    purpose: str,
    meta: dict[str, str],
    only_replica: int | None = None,
) -> Program:
    """Copy each replica's pipeline to its ranks and micro-batches."""
    kept = _kept_pipelines(layout, only_replica)
    if only_replica is not None:
        meta = {**meta, "folded": str(only_replica)}
    ranks = layout.rank_table()
    groups, group_of = group_table(layout)
    across_groups, across_group_of = across_group_table(layout)
    groups, across_group_of = groups + across_groups, across_group_of + len(groups)
    tied_groups, tied_group_of = tied_group_table(layout)
    groups, tied_group_of = groups + tied_groups, tied_group_of + len(groups)
    groups = (*groups, norm_group(layout))
    parts: list[Columns] = []
    edges: list[Edges] = []
    first_row = 0
    for pipeline in kept:
        lowered = pipelines[layout.pipeline_micro_batches[pipeline]]
        for lane in range(ranks.shape[2]):
            copy = _copy(layout, lowered.columns, ranks[..., lane], group_of[..., lane], pipeline)
            across = across_group_of[..., lane]
            parts.append(_with_own_groups(copy, across, tied_group_of[:, lane], len(groups) - 1))
            shifted = lowered.edges.source + first_row, lowered.edges.target + first_row
            edges.append(replace(lowered.edges, source=shifted[0], target=shifted[1]))
            first_row += len(lowered.columns)
    columns = Columns.join(parts)
    groups = groups if (columns.kind == NORM).any() else groups[:-1]
    order = np.argsort(columns.rank, kind="stable")
    return Program(
        ranks=layout.ranks,
        steps_per_cycle=1,
        columns=columns.take(order),
        edges=renumber(Edges.join(edges), order),
        groups=groups if is_collective(columns.kind).any() else (),
        obligations=replace(
            _obligations(layout, purpose, kept), gradient_norm=bool((columns.kind == NORM).any())
        ),
        meta=meta,
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


def _copy(layout: PipelineLayout, columns: Columns, ranks: Ints, group_of: Ints, pipeline: int) -> Columns:
    """The rows of a pipeline in one lane; `ranks` of (pipeline, device), `group_of` (stage, replica)."""
    micro_batch, first_replica = columns.micro_batch, pipeline * layout.paths
    first = layout.first_micro_batch[first_replica]
    replica = first_replica + columns.replica
    return replace(
        columns,
        rank=ranks[pipeline, columns.rank],
        peer=np.where(columns.peer == NONE, NONE, ranks[pipeline, columns.peer]),
        micro_batch=np.where(micro_batch == NONE, NONE, micro_batch + first),
        replica=replica,
        group=np.where(is_any_of(columns.kind, COLLECTIVES), group_of[columns.stage, replica], NONE),
    )


def _with_own_groups(
    columns: Columns, across_group_of: Ints, tied_group_of: Ints, norm_group: int
) -> Columns:
    """The columns with further collectives in their own groups: across islands, of each tied weight, of the
    norm."""
    tied = np.flatnonzero(columns.kind == REDUCE_TIED)
    group = np.where(columns.kind == NORM, norm_group, columns.group)
    group[tied] = tied_group_of[columns.part[tied]]
    across = np.flatnonzero(columns.kind == REDUCE_ACROSS)
    group[across] = across_group_of[columns.stage[across], columns.replica[across]]
    return replace(columns, group=group)


def _obligations(layout: PipelineLayout, purpose: str, pipelines: Sequence[int]) -> Obligations:
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
    backward, steps = (rows[rows[:, 0] >= layout.frozen_stages] for rows in (passes, steps))
    return Obligations(
        purpose=purpose,
        stage_edges=layout.edges,
        forward=passes,
        backward=backward if trains else passes[:0],
        step=np.pad(steps, ((0, 0), (0, 1))) if trains else np.zeros((0, 3), dtype=np.int64),
        owners={
            (stage, replica): layout.stages[stage].replicas[replica]
            for stage in range(len(stages))
            for replica in replicas
        },
        tied=tuple(one.stages for one in layout.tied) if trains else (),
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
