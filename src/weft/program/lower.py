"""The lowering of one pipeline: messages, steps and edges around given compute orders.

Devices stand in place of ranks, and micro-batches and the replicas of a stage count from 0.
`weft.program.assemble` copies the result to every pipeline and tensor lane. Of M micro-batches on n paths,
the first M/n run along the first path, and so on. The lowering is array arithmetic, without a Python object
per instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.codes import numbered
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    is_any_of,
)
from weft.program.layout import PipelineLayout
from weft.program.program import NONE, Columns, Edges
from weft.program.schedules.base import ComputeOrder
from weft.program.splits import Crossings, crossings

# Computations from the issue of a receive to its user. A rendezvous needs both ends, and each of its hops may
# wait for a time slice on a host with all cores computing.
RECEIVE_AHEAD = 4

# The phases around one compute instruction, in the order in which the host issues them.
_RECEIVES, _COMPUTE, _SENDS = range(3)


class _Block(NamedTuple):
    """Rows with devices in place of ranks, and their positions in the issue order of their device.

    `slot` is the position of their compute instruction, `phase` their side of it, `turn` their order on this
    side.
    """

    columns: Columns
    slot: Ints
    phase: int
    turn: Ints


class _Lookup(NamedTuple):
    """Compute rows in the order of `_Owed`, by their result: output, input gradient, weight gradient."""

    forward: Ints
    input_gradient: Ints
    weight_gradient: Ints


class _Owed(NamedTuple):
    """The forwards of all stages, stage by stage, each by its own numbers of micro-batches.

    `starts` is the first forward of each stage, plus the total. `stage`, `home` (the device) and `replica`
    have one entry per forward.
    """

    starts: Ints
    stage: Ints
    home: Ints
    replica: Ints


class LoweredPipeline(NamedTuple):
    """A lowered pipeline: rows are sorted by device; replicas of a stage and micro-batches count from 0."""

    columns: Columns
    edges: Edges


def lower(
    layout: PipelineLayout, orders: Sequence[ComputeOrder], micro_batches: int, name: str, *, trains: bool
) -> LoweredPipeline:
    """Add messages, steps and edges to the compute orders of one pipeline.

    `orders` are by device, as in `layout.placement`, without backwards of frozen stages. They number
    micro-batches by stage. `micro_batches` is the pipeline's share of the batch; `name` is the orders' name.

    Raises:
        InputError: when the orders do not run every stage and micro-batch exactly once on its device.
    """
    path = np.arange(micro_batches, dtype=np.int64) * layout.paths // micro_batches
    owed = _owed(layout, path)
    compute = _compute_block(orders, layout, path)
    lookup = _look_up(compute, owed, layout, name, trains=trains)
    blocks = [compute]
    edges = []
    pairs = np.array(layout.edges, dtype=np.int64).reshape(-1, 2)
    sent = layout.message_bytes
    payload, returned = (
        np.array([sizes.get(pair, sent[pair]) for pair in layout.edges], dtype=np.int64)
        for sizes in (sent, layout.returned_bytes)
    )
    crossing = crossings(layout.splits, pairs, micro_batches)
    before = owed.starts[pairs[crossing.edge, 0]] + crossing.producer
    after = owed.starts[pairs[crossing.edge, 1]] + crossing.consumer
    flows = [(lookup.forward, before, after, crossing, payload, SEND_ACTIVATION, RECEIVE_ACTIVATION)]
    if trains:
        trained = pairs[crossing.edge, 0] >= layout.frozen_stages
        back = after[trained], before[trained], Crossings(*(column[trained] for column in crossing))
        flows.append((lookup.input_gradient, *back, returned, SEND_GRADIENT, RECEIVE_GRADIENT))
    for rows, makers, users, crossed, sizes, send, receive in flows:
        away = owed.home[makers] != owed.home[users]
        edges.append(_pairs(rows[makers[~away]], rows[users[~away]]))
        sends, receives, source, target = _message_blocks(
            compute,
            rows[makers[away]],
            rows[users[away]],
            crossed.number[away],
            sizes[crossed.edge[away]],
            send,
            receive,
        )
        first_send = sum(len(block.slot) for block in blocks)
        send_rows = first_send + np.arange(len(source), dtype=np.int64)
        receive_rows = send_rows + len(source)
        edges += [_pairs(source, send_rows), _pairs(send_rows, receive_rows), _pairs(receive_rows, target)]
        blocks += [sends, receives]
    if trains:
        trained_from = owed.starts[layout.frozen_stages]
        forward, input_gradient, weight_gradient = (rows[trained_from:] for rows in lookup)
        split = input_gradient != weight_gradient
        edges.append(_pairs(forward, input_gradient))
        edges.append(_pairs(input_gradient[split], weight_gradient[split]))
        _add_steps(layout, compute, owed, lookup, blocks, edges)
    return _sort(blocks, Edges.join(edges))


def _pairs(source: Ints, target: Ints, distance: int = 0) -> Edges:
    source, target = np.broadcast_arrays(source, target)
    return Edges.of(source.ravel(), target.ravel(), distance)


def _owed(layout: PipelineLayout, path: Ints) -> _Owed:
    """Return the forwards of every stage and micro-batch; `path` is by micro-batch of the batch."""
    splits = layout.splits
    starts = np.append(0, np.cumsum(splits * len(path))).astype(np.int64)
    stage = np.repeat(np.arange(len(splits), dtype=np.int64), splits * len(path))
    number = np.arange(len(stage), dtype=np.int64) - starts[stage]
    on = path[number // splits[stage]]
    return _Owed(starts, stage, layout.placement[on, stage], layout.path_copies[on, stage])


def _compute_block(orders: Sequence[ComputeOrder], layout: PipelineLayout, path: Ints) -> _Block:
    """Return all computations; `path` is by micro-batch of the batch."""
    lengths = [len(order.kind) for order in orders]
    stage = np.concatenate([order.stage for order in orders])
    micro_batch = np.concatenate([order.micro_batch for order in orders])
    columns = Columns.of(
        sum(lengths),
        kind=np.concatenate([order.kind for order in orders]),
        stage=stage,
        micro_batch=micro_batch,
        replica=layout.path_copies[path[micro_batch // layout.splits[stage]], stage],
        rank=np.repeat(np.arange(len(orders), dtype=np.int64), lengths),
    )
    slot = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    return _Block(columns, slot, _COMPUTE, np.zeros_like(slot))


def _look_up(compute: _Block, owed: _Owed, layout: PipelineLayout, name: str, *, trains: bool) -> _Lookup:
    """Find the compute row of every output, input gradient and weight gradient."""
    columns = compute.columns

    def table(first_stage: int, *kinds: int) -> Ints:
        rows = np.flatnonzero(is_any_of(columns.kind, kinds))
        place = owed.starts[columns.stage[rows]] + columns.micro_batch[rows]
        found = np.full(len(owed.home), NONE, dtype=np.int64)
        found[place] = rows
        wanted = found[owed.starts[first_stage] :]
        misplaced = owed.home[place] != columns.rank[rows]
        if len(rows) != len(wanted) or (wanted == NONE).any() or misplaced.any():
            problem = f"{name!r} must run every stage and micro-batch exactly once, on the stage's device"
            raise InputError(Violation("schedule", problem))
        return found

    forward = table(0, FORWARD)
    if not trains:
        return _Lookup(forward, forward, forward)
    return _Lookup(
        forward,
        table(layout.frozen_stages, BACKWARD, BACKWARD_INPUT),
        table(layout.frozen_stages, BACKWARD, BACKWARD_WEIGHT),
    )


def _message_blocks(
    compute: _Block, source: Ints, target: Ints, number: Ints, payload: Ints, send: int, receive: int
) -> tuple[_Block, _Block, Ints, Ints]:
    """Return sends and receives of messages, and their `source` and `target` compute rows, in the same order.

    `number` (micro-batch) and `payload` (bytes) are by message. A send follows its maker. A receive is issued
    `RECEIVE_AHEAD` computations before its user, but never after a later message of the same channel. So
    both ends of a channel agree on the order.
    """
    columns = compute.columns
    length = len(source)
    devices = int(columns.rank.max()) + 1
    channel = columns.rank[source] * devices + columns.rank[target]
    order = np.lexsort((columns.stage[target], compute.slot[source], channel))
    source, target, channel = source[order], target[order], channel[order]

    wanted = np.maximum(compute.slot[target] - RECEIVE_AHEAD, 0)
    # The minimum over all later messages of the same channel; the offset keeps channels apart.
    offset = channel * (len(columns) + 1)
    slot = np.minimum.accumulate((wanted + offset)[::-1])[::-1] - offset

    def ends(kind: int, own: Ints, other: Ints) -> Columns:
        """Return one end of each message, at its own computation; the other end is at the other one."""
        return Columns.of(
            length,
            kind=kind,
            stage=columns.stage[own],
            part=columns.stage[other],
            rank=columns.rank[own],
            peer=columns.rank[other],
            replica=columns.replica[own],
            micro_batch=number[order],
            bytes=payload[order],
        )

    return (
        _Block(ends(send, source, target), compute.slot[source], _SENDS, columns.stage[target]),
        _Block(ends(receive, target, source), slot, _RECEIVES, np.arange(length, dtype=np.int64)),
        source,
        target,
    )


def _add_steps(
    layout: PipelineLayout,
    compute: _Block,
    owed: _Owed,
    lookup: _Lookup,
    blocks: list[_Block],
    edges: list[Edges],
) -> None:
    """Append the optimizer steps at the end of each device, in the order of the stages' last backwards."""
    # One step for every replica of every trained stage.
    first = layout.frozen_stages
    copies = np.array(layout.copies[first:], dtype=np.int64)
    index, replica = numbered(copies)
    before = np.cumsum(copies) - copies
    trained = np.arange(owed.starts[first], owed.starts[-1], dtype=np.int64)
    step = before[owed.stage[trained] - first] + owed.replica[trained]
    makers, users = lookup.weight_gradient[trained], lookup.forward[trained]
    last = np.zeros(len(index), dtype=np.int64)
    np.maximum.at(last, step, compute.slot[makers])
    stage = first + index
    device = layout.placement[replica * (layout.paths // copies[index]), stage]
    end = np.bincount(compute.columns.rank)[device]
    steps = Columns.of(
        len(index),
        kind=STEP,
        stage=stage,
        rank=device,
        replica=replica,
    )
    step_rows = sum(len(block.slot) for block in blocks) + step
    blocks.append(_Block(steps, end, _COMPUTE, last))
    edges += [_pairs(makers, step_rows), _pairs(step_rows, users, distance=1)]


def _sort(blocks: Sequence[_Block], edges: Edges) -> LoweredPipeline:
    """Sort rows in host order, device by device, and renumber the edges."""
    columns = Columns.join([block.columns for block in blocks])
    phase = np.repeat([block.phase for block in blocks], [len(block.slot) for block in blocks])
    slot = np.concatenate([block.slot for block in blocks])
    turn = np.concatenate([block.turn for block in blocks])
    order = np.lexsort((turn, phase, slot, columns.rank))
    return LoweredPipeline(columns.take(order), renumber(edges, order))


def renumber(edges: Edges, order: Ints) -> Edges:
    """Return the edges after rows were sorted by `order`."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order), dtype=np.int64)
    return edges.at(position)
