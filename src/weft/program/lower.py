"""The lowering of one pipeline: messages, reductions, steps and edges around given compute orders.

Devices stand in place of ranks and micro-batches count from 0; `weft.program.build` copies the result to
every replica and tensor lane. All of it is array arithmetic: no Python object per instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.errors import InputError, Violation
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
from weft.program.program import NONE, Columns, Edges, Ints
from weft.program.schedules.base import ComputeOrder

# How many computations before its user a receive is issued: a rendezvous needs both ends, and on a host whose
# cores all compute, each of its hops may wait for a time slice.
RECEIVE_AHEAD = 4

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


class LoweredPipeline(NamedTuple):
    """One lowered pipeline: rows sorted by device, micro-batches counted from 0."""

    columns: Columns
    edges: Edges


def lower(
    layout: PipelineLayout, orders: Sequence[ComputeOrder], micro_batches: int, name: str, *, trains: bool
) -> LoweredPipeline:
    """Add messages, reductions, steps and edges to the compute orders of one pipeline.

    `orders` are by device, as in `layout.placement`; `name` is who made them.

    Raises:
        InputError: when the orders do not run every stage and micro-batch exactly once on its device.
    """
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

    A send follows its maker. A receive is issued `RECEIVE_AHEAD` computations before its user, but never
    after a later message of the same channel: both ends of a channel agree on the order.
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

    wanted = np.maximum(compute.slot[target] - RECEIVE_AHEAD, 0)
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


def _sort(blocks: Sequence[_Block], edges: Edges) -> LoweredPipeline:
    """Put rows in host order, device by device, and let the edges follow them."""
    columns = Columns.join([block.columns for block in blocks])
    phase = np.repeat([block.phase for block in blocks], [len(block.slot) for block in blocks])
    slot = np.concatenate([block.slot for block in blocks])
    turn = np.concatenate([block.turn for block in blocks])
    order = np.lexsort((turn, phase, slot, columns.rank))
    return LoweredPipeline(columns.take(order), renumber(edges, order))


def renumber(edges: Edges, order: Ints) -> Edges:
    """The same edges after rows were put in `order`."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order), dtype=np.int64)
    return Edges(source=position[edges.source], target=position[edges.target], distance=edges.distance)
