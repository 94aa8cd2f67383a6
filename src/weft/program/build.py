"""The lowering: from each device's compute order to a Program with messages, reductions and steps.

One pipeline is lowered with devices in place of ranks; every replica and tensor lane is a copy of it with its
own ranks and micro-batches. All of it is array arithmetic: no Python object per instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.errors import InputError, Violation, nearest
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    REDUCE,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
)
from weft.program.layout import PipelineLayout
from weft.program.program import NONE, Columns, Edges, Ints, Obligations, Program
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, Schedule

# What happens around one compute instruction, in the order in which the host issues it.
_RECEIVES, _COMPUTE, _SENDS, _REDUCES = range(4)


class _Block(NamedTuple):
    """Rows with devices in place of ranks, and where the host issues them on their device.

    `slot` is the place of the compute instruction they belong to, `phase` their side of it, `turn` their
    order there.
    """

    columns: Columns
    slot: Ints
    phase: int
    turn: Ints


class _Lookup(NamedTuple):
    """Row of (stage, micro-batch) by what it makes: output, input gradient, weight gradient."""

    forward: Ints
    input_gradient: Ints
    weight_gradient: Ints


class _Pipeline(NamedTuple):
    """One lowered pipeline: rows sorted by device, micro-batches counted from 0."""

    columns: Columns
    edges: Edges


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
    pipelines: dict[int, _Pipeline] = {}
    for micro_batches in dict.fromkeys(layout.micro_batches):
        orders = _schedule_orders(layout, schedule, options, micro_batches)
        pipelines[micro_batches] = _lower(layout, orders, micro_batches, schedule.name, trains=True)
    return _assemble(layout, pipelines, "train", {"schedule": schedule.name}, only_replica)


def build_evaluation_program(layout: PipelineLayout, *, only_replica: int | None = None) -> Program:
    """The program that runs every micro-batch forward, stage by stage, and changes nothing.

    Raises:
        InputError: when the layout is broken.
    """
    layout.require_valid()
    placement = layout.placement
    pipelines: dict[int, _Pipeline] = {}
    for micro_batches in dict.fromkeys(layout.micro_batches):
        orders = [
            _forward_order(np.flatnonzero(placement == device), micro_batches)
            for device in range(int(placement.max()) + 1)
        ]
        pipelines[micro_batches] = _lower(layout, orders, micro_batches, "evaluation", trains=False)
    return _assemble(layout, pipelines, "evaluate", {}, only_replica)


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


def _lower(
    layout: PipelineLayout, orders: Sequence[ComputeOrder], micro_batches: int, name: str, *, trains: bool
) -> _Pipeline:
    """Add messages, reductions, steps and edges to the compute orders of one pipeline."""
    compute = _compute_block(orders)
    lookup = _look_up(compute, layout.placement, micro_batches, name, trains=trains)
    blocks = [compute]
    edges = []
    pairs = np.array(layout.edges, dtype=np.int64).reshape(-1, 2)
    payload = np.array([layout.message_bytes[pair] for pair in layout.edges], dtype=np.int64)
    flows = [(lookup.forward, pairs[:, 0], pairs[:, 1], SEND_ACTIVATION, RECEIVE_ACTIVATION)]
    if trains:
        flows.append((lookup.input_gradient, pairs[:, 1], pairs[:, 0], SEND_GRADIENT, RECEIVE_GRADIENT))
    crosses = layout.placement[pairs[:, 0]] != layout.placement[pairs[:, 1]]
    for rows, makers, users, send, receive in flows:
        edges.append(_pairs(rows[makers[~crosses]], rows[users[~crosses]]))
        sends, receives, source, target = _message_blocks(
            compute, rows[makers[crosses]], rows[users[crosses]], payload[crosses], send, receive
        )
        first_send = sum(len(block.slot) for block in blocks)
        send_rows = first_send + np.arange(len(source), dtype=np.int64)
        receive_rows = send_rows + len(source)
        edges += [_pairs(source, send_rows), _pairs(send_rows, receive_rows), _pairs(receive_rows, target)]
        blocks += [sends, receives]
    if trains:
        edges += _backward_edges(lookup)
        _add_steps(layout, compute, lookup, blocks, edges)
    return _sort(blocks, Edges.join(edges))


def _pairs(source: Ints, target: Ints, distance: int = 0) -> Edges:
    source, target = np.broadcast_arrays(source, target)
    return Edges.of(source.ravel(), target.ravel(), distance)


def _compute_block(orders: Sequence[ComputeOrder]) -> _Block:
    lengths = [len(order.kind) for order in orders]
    columns = Columns.of(
        sum(lengths),
        kind=np.concatenate([order.kind for order in orders]),
        stage=np.concatenate([order.stage for order in orders]),
        micro_batch=np.concatenate([order.micro_batch for order in orders]),
        rank=np.repeat(np.arange(len(orders), dtype=np.int64), lengths),
    )
    slot = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    return _Block(columns, slot, _COMPUTE, np.zeros_like(slot))


def _look_up(compute: _Block, placement: Ints, micro_batches: int, name: str, *, trains: bool) -> _Lookup:
    columns = compute.columns

    def table(*kinds: int) -> Ints:
        rows = np.flatnonzero(np.isin(columns.kind, kinds))
        stage, micro_batch = columns.stage[rows], columns.micro_batch[rows]
        found = np.full((len(placement), micro_batches), NONE, dtype=np.int64)
        found[stage, micro_batch] = rows
        if len(rows) != found.size or (found == NONE).any() or (placement[stage] != columns.rank[rows]).any():
            raise InputError(
                Violation(
                    "schedule",
                    f"{name!r} must run every stage and micro-batch exactly once, on the stage's device",
                )
            )
        return found

    forward = table(FORWARD)
    if not trains:
        return _Lookup(forward, forward, forward)
    return _Lookup(forward, table(BACKWARD, BACKWARD_INPUT), table(BACKWARD, BACKWARD_WEIGHT))


def _message_blocks(
    compute: _Block, makers: Ints, users: Ints, payload: Ints, send: int, receive: int
) -> tuple[_Block, _Block, Ints, Ints]:
    """Sends and receives of messages from compute rows `makers` to `users`, shape (edges, micro-batches).

    A send follows its maker. A receive is issued one computation before its user, so that the transfer runs
    under that computation, but never after a later message of the same channel: both ends of a channel agree
    on the order.
    """
    columns = compute.columns
    length = makers.size
    source, target = makers.ravel(), users.ravel()
    here, there = columns.rank[source], columns.rank[target]
    devices = int(columns.rank.max()) + 1
    channel = here * devices + there
    order = np.lexsort((columns.stage[target], compute.slot[source], channel))
    source, target, channel = source[order], target[order], channel[order]
    here, there = here[order], there[order]

    wanted = np.maximum(compute.slot[target] - 1, 0)
    # The minimum over all later messages of the same channel; the offset keeps channels apart.
    offset = channel * (len(columns) + 1)
    slot = np.minimum.accumulate((wanted + offset)[::-1])[::-1] - offset

    values = {
        "micro_batch": columns.micro_batch[source],
        "bytes": np.repeat(payload, makers.shape[1])[order],
    }
    from_stage, to_stage = columns.stage[source], columns.stage[target]
    sends = Columns.of(length, kind=send, stage=from_stage, part=to_stage, rank=here, peer=there, **values)
    receives = Columns.of(
        length, kind=receive, stage=to_stage, part=from_stage, rank=there, peer=here, **values
    )
    return (
        _Block(sends, compute.slot[source], _SENDS, to_stage),
        _Block(receives, slot, _RECEIVES, np.arange(length, dtype=np.int64)),
        source,
        target,
    )


def _backward_edges(lookup: _Lookup) -> list[Edges]:
    """A backward needs what its forward saved; a weight part needs its input part."""
    split = lookup.input_gradient != lookup.weight_gradient
    return [
        _pairs(lookup.forward, lookup.input_gradient),
        _pairs(lookup.input_gradient[split], lookup.weight_gradient[split]),
    ]


def _add_steps(
    layout: PipelineLayout, compute: _Block, lookup: _Lookup, blocks: list[_Block], edges: list[Edges]
) -> None:
    """Append the reduction after a stage's last backward and the optimizer steps at the end of the rank."""
    stages = np.arange(len(layout.stages), dtype=np.int64)
    placement = layout.placement
    last = compute.slot[lookup.weight_gradient].max(axis=1)
    end = np.bincount(compute.columns.rank)[placement]
    first_row = sum(len(block.slot) for block in blocks)
    makers = lookup.weight_gradient
    if layout.replicas > 1:
        payload = [stage.gradient_bytes for stage in layout.stages]
        reduces = Columns.of(len(stages), kind=REDUCE, stage=stages, rank=placement, bytes=payload)
        blocks.append(_Block(reduces, last, _REDUCES, stages))
        reduce_rows = first_row + stages
        edges.append(_pairs(makers, reduce_rows[:, None]))
        makers = reduce_rows[:, None]
        first_row += len(stages)
    steps = Columns.of(len(stages), kind=STEP, stage=stages, rank=placement)
    blocks.append(_Block(steps, end, _COMPUTE, last))
    step_rows = (first_row + stages)[:, None]
    edges += [_pairs(makers, step_rows), _pairs(step_rows, lookup.forward, distance=1)]


def _sort(blocks: Sequence[_Block], edges: Edges) -> _Pipeline:
    """Put rows in host order, device by device, and let the edges follow them."""
    columns = Columns.join([block.columns for block in blocks])
    phase = np.repeat([block.phase for block in blocks], [len(block.slot) for block in blocks])
    slot = np.concatenate([block.slot for block in blocks])
    turn = np.concatenate([block.turn for block in blocks])
    order = np.lexsort((turn, phase, slot, columns.rank))
    return _Pipeline(columns.take(order), _renumber(edges, order))


def _renumber(edges: Edges, order: Ints) -> Edges:
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order), dtype=np.int64)
    return Edges(source=position[edges.source], target=position[edges.target], distance=edges.distance)


def _assemble(
    layout: PipelineLayout,
    pipelines: dict[int, _Pipeline],
    purpose: str,
    meta: dict[str, str],
    only_replica: int | None,
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
        edges=_renumber(Edges.join(edges), order),
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
