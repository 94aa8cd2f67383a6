"""Bytes that ranks hold: all the time, and from instruction to instruction.

A forward pass keeps activations, or what to recompute them from, until its backward pass (or its weight part)
has ended. A message is held by its maker until it is sent, and by its receiver until its user has run. All of
it grows by the allocator's slack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weft.describe.amount import Shape
from weft.describe.device import Device
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Recompute
from weft.predict.cost.memory import (
    STACKS,
    plan_states,
    resident_bytes,
    shared_parameters,
    stage_parameters,
    unshared_bytes,
    with_slack,
)
from weft.predict.cost.pricing import Pricing
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, MESSAGES, is_any_of
from weft.program.program import Ints


def base_bytes(pricing: Pricing) -> Ints:
    """Per rank of the program: states and buffers of its stages, and room to recompute its largest layer."""
    plan, ranks = pricing.plan, pricing.program.ranks
    stages = (
        (
            pricing.placed.ranks_of_stage[index].ravel(),
            stage_parameters(pricing.model.graph, stage.layers, pricing.placed.shape(index)),
            plan.island or len(stage.replicas),
        )
        for index, stage in enumerate(plan.stages)
    )
    states, bucket_bytes = plan_states(plan), STACKS[plan.stack].bucket_bytes
    resident = resident_bytes(stages, ranks, states, plan.sharding, bucket_bytes=bucket_bytes)
    return with_slack(resident + _whole_copies(pricing) + _recomputed_bytes(pricing))


def _whole_copies(pricing: Pricing) -> Ints:
    """What copies of tied weights take beside a share of them: their holders share nothing out; (ranks,)."""
    more = np.zeros(pricing.program.ranks, dtype=np.int64)
    plan = pricing.plan
    states = plan_states(plan)
    for index, stage in enumerate(plan.stages):
        for one in shared_parameters(pricing.model.graph, stage.layers):
            count = round(one.parameters(pricing.placed.shape(index)))
            sharers = plan.island or len(stage.replicas)
            more[pricing.placed.ranks_of_stage[index]] += unshared_bytes(
                count, sharers, states, plan.sharding
            )
    return more


def _recomputed_bytes(pricing: Pricing) -> Ints:
    """Activations of the one layer that a backward pass has run forward again; shape (ranks,)."""
    room = np.zeros(pricing.program.ranks, dtype=np.int64)
    if pricing.program.obligations.purpose != "train":
        return room
    largest = _per_place(pricing, pricing.model.compute.recomputed_bytes)
    for index, ranks in enumerate(pricing.placed.ranks_of_stage):
        room[ranks] = np.maximum(room[ranks], largest[index, pricing.placed.device_set_of_rank[ranks]])
    return room


def live_bytes(pricing: Pricing) -> Ints:
    """Change of its rank's live bytes at the end of every instruction; sums to zero over a cycle.

    Where a backward pass is split, what its input part has recomputed stays until its weight part has ended.
    """
    columns = pricing.program.columns
    change = np.zeros(len(columns), dtype=np.int64)
    if pricing.program.obligations.purpose == "train":
        left = with_slack(_per_place(pricing, pricing.model.compute.kept_bytes))
        whole = with_slack(_per_place(pricing, pricing.model.compute.all_kept_bytes))
        for kind, changes in kept_changes(left, whole).items():
            rows = np.flatnonzero(columns.kind == kind)
            change[rows] += changes[
                columns.stage[rows], pricing.placed.device_set_of_rank[columns.rank[rows]]
            ]
    return change + _message_changes(pricing)


def kept_changes(left: Ints, whole: Ints) -> Mapping[int, Ints]:
    """By kind of computation, the change of what a stage keeps: `left` by a forward, `whole` for weights.

    Where stages keep everything both are the same, and the input part of a backward changes nothing.
    """
    return {
        FORWARD: left,
        BACKWARD: -left,
        BACKWARD_INPUT: whole - left,
        BACKWARD_WEIGHT: -whole,
    }


_BytesOf = Callable[[LayerGraph, Sequence[int], Shape, str, Device, Recompute], int]


def _per_place(pricing: Pricing, bytes_of: _BytesOf) -> Ints:
    """What a stage takes on the worst device of a device set; shape (stages, device sets)."""
    plan = pricing.plan
    table = np.zeros((len(plan.stages), len(pricing.placed.device_sets)), dtype=np.int64)
    for index, devices in pricing.placed.places:
        stage, shape = plan.stages[index], pricing.placed.shape(index)
        table[index, devices] = max(
            bytes_of(pricing.model.graph, stage.layers, shape, plan.precision, device, stage.recompute)
            for device in pricing.placed.device_sets[devices]
        )
    return table


def _message_changes(pricing: Pricing) -> Ints:
    columns, edges = pricing.program.columns, pricing.program.edges
    change = np.zeros(len(columns), dtype=np.int64)
    payload = with_slack(columns.bytes)
    sends, receives = zip(*MESSAGES, strict=True)
    is_send, is_receive = is_any_of(columns.kind, sends), is_any_of(columns.kind, receives)
    into_send = is_send[edges.target] & (edges.distance == 0)
    from_receive = is_receive[edges.source] & (edges.distance == 0)
    # A message with several edges to one end is still one message.
    messages, first = np.unique(edges.target[into_send], return_index=True)
    makers = edges.source[into_send][first]
    np.add.at(change, makers, payload[messages])
    change[messages] -= payload[messages]
    messages, first = np.unique(edges.source[from_receive], return_index=True)
    users = edges.target[from_receive][first]
    np.subtract.at(change, users, payload[messages])
    change[messages] += payload[messages]
    return change
