"""Bytes that ranks hold: all the time, and from instruction to instruction.

A forward pass keeps activations until its backward pass (or its weight part) has ended. A message is held by
its maker until it is sent, and by its receiver until its user has run. All of it grows by the allocator's
slack.
"""

from __future__ import annotations

import numpy as np

from weft.predict.cost.memory import ALLOCATOR_SLACK, stage_parameters, state_bytes
from weft.predict.cost.pricing import Pricing
from weft.program.kinds import BACKWARD, BACKWARD_WEIGHT, FORWARD, MESSAGES
from weft.program.program import Ints


def base_bytes(pricing: Pricing) -> Ints:
    """Per rank of the program: states of its stages and the buffer of its largest reduction."""
    plan = pricing.plan
    states = state_bytes(plan.precision)
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    bucket = np.zeros_like(held)
    for index, stage in enumerate(plan.stages):
        parameters = stage_parameters(pricing.graph, stage.layers, pricing.shape(index))
        ranks = np.array([rank for copy in stage.replicas for rank in copy.ranks], dtype=np.int64)
        np.add.at(held, ranks, parameters * states.total)
        # Gradients are reduced in place, one stage after the other, with as much room for what arrives.
        if len(stage.replicas) > 1:
            np.maximum.at(bucket, ranks, parameters * states.gradients)
    return _with_slack(held + bucket)


def live_bytes(pricing: Pricing) -> Ints:
    """Change of its rank's live bytes at the end of every instruction; sums to zero over a cycle."""
    program, plan = pricing.program, pricing.plan
    columns = program.columns
    change = np.zeros(len(program), dtype=np.int64)
    if program.obligations.purpose == "train":
        sets = pricing.device_set_of_rank[columns.rank]
        kept = np.zeros((len(plan.stages), len(pricing.device_sets)), dtype=np.int64)
        for stage, devices in pricing.places:
            layers, shape = plan.stages[stage].layers, pricing.shape(stage)
            kept[stage, devices] = max(
                pricing.compute.kept_bytes(pricing.graph, layers, shape, plan.precision, device)
                for device in pricing.device_sets[devices]
            )
        kept = _with_slack(kept)
        makes = columns.kind == FORWARD
        frees = np.isin(columns.kind, (BACKWARD, BACKWARD_WEIGHT))
        change[makes] += kept[columns.stage, sets][makes]
        change[frees] -= kept[columns.stage, sets][frees]
    return change + _message_changes(pricing)


def _message_changes(pricing: Pricing) -> Ints:
    columns, edges = pricing.program.columns, pricing.program.edges
    change = np.zeros(len(columns), dtype=np.int64)
    payload = _with_slack(columns.bytes)
    sends, receives = (np.array(kinds) for kinds in zip(*MESSAGES, strict=True))
    is_send, is_receive = np.isin(columns.kind, sends), np.isin(columns.kind, receives)
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


def _with_slack(held: Ints) -> Ints:
    slack: Ints = np.rint(held * ALLOCATOR_SLACK).astype(np.int64)
    return held + slack
