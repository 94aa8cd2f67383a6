"""Bytes that ranks hold: all the time, and from instruction to instruction.

A forward pass keeps activations, or inputs for recomputation, until its backward pass (or its weight part)
has ended. The sender holds a message until it is sent. The receiver holds it until its user has run. All of
it grows by the allocator's slack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.bundles import parts
from weft.describe.plan import Choice
from weft.predict.cost.memory import STEPPED_BYTES, stage_parameters, with_slack
from weft.predict.cost.pricing import Pricing
from weft.program.arrays import Floats, Ints
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    STEP,
    is_any_of,
    message_kinds,
)
from weft.program.segments import BACKWARD_SEGMENT, INPUT_SEGMENT, cutter_of, segment_borders

# Passes that free a stage's kept activations layer by layer, or make them again.
_BACKWARDS = (BACKWARD, BACKWARD_INPUT, BACKWARD_SEGMENT, INPUT_SEGMENT)


# Relative half-widths of 90 % intervals. States are known, and an allocator places them once, in few blocks.
RESIDENT_SPREAD = 0.01
# Activations, temporaries and messages: of the rows of `benchmarks/tracked_memory`, 90 % err by less.
TRACKED_SPREAD = 0.014
# An assumption: what comes and goes leaves fragments, and kernels of an accelerator keep other tensors.
FRAGMENTS_SPREAD = 0.04
LIVE_SPREAD = TRACKED_SPREAD + FRAGMENTS_SPREAD


@dataclass(frozen=True)
class Held:
    """Bytes that every rank of a program holds all the time, without slack; shape (ranks,).

    Attributes:
        spread: relative half-width of their 90 % interval.
        source: their origin, in words.
        parts: the same bytes by name, where several kinds are told apart.
    """

    value: Ints
    spread: float = RESIDENT_SPREAD
    source: str = "counted by parameters"
    parts: Mapping[str, Ints] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """Bytes that a method keeps on every rank all the time; a method contributes them."""

    what: str
    hook: Callable[[Pricing], Held]


@dataclass(frozen=True, kw_only=True)
class KeptAway:
    """Bytes that a method keeps in host memory; the method contributes it.

    Attributes:
        what: the method's part of a plan, in words.
        stages: gets the methods of a plan and its number of stages. It returns the stages whose optimizer
            states are mostly off their devices, and those whose activations are. Lower bounds use it.
        held: returns the most bytes in host memory, by name, each of shape (ranks,).
    """

    what: str
    stages: Callable[[Sequence[Choice], int], tuple[Sequence[int], Sequence[int]]]
    held: Callable[[Pricing], Mapping[str, Ints]]


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Bytes that a method's instructions free or take; a method contributes them.

    `hook` returns the change at the end of every instruction, with slack; each cycle adds up to 0.
    """

    what: str
    hook: Callable[[Pricing], Ints]


def held_bytes(pricing: Pricing) -> dict[str, Held]:
    """Return the bytes that each method keeps all the time, without slack, by their names."""
    return {one.what: one.hook(pricing) for one in parts(ResidentBytes)}


def base_bytes(held: Iterable[Held], ranks: int) -> Ints:
    """Return the bytes that all methods keep all the time, with slack; shape (ranks,)."""
    return with_slack(sum((one.value for one in held), np.zeros(ranks, dtype=np.int64)))


def base_half_widths(held: Iterable[Held], ranks: int) -> Floats:
    """Return the half-widths of the 90 % intervals of `base_bytes`; errors count as fully correlated."""
    half_widths: Floats = np.zeros(ranks)
    for one in held:
        half_widths += one.spread * with_slack(one.value)
    return half_widths


def live_bytes(pricing: Pricing) -> Ints:
    """Return the change of a rank's live bytes at the end of every instruction; each cycle adds up to 0."""
    return sum(live_parts(pricing).values(), np.zeros(len(pricing.program), dtype=np.int64))


def live_parts(pricing: Pricing) -> dict[str, Ints]:
    """Return the changes of `live_bytes` by the kind of bytes.

    With a split backward pass, activations recomputed in its input part stay until its weight part has ended.
    """
    methods = {one.what: one.hook(pricing) for one in parts(LiveBytes)}
    return {
        "activations": _kept_changes(pricing),
        "messages": _message_changes(pricing),
        "tensors across segments": _border_changes(pricing),
        **methods,
    }


def _kept_changes(pricing: Pricing) -> Ints:
    columns = pricing.program.columns
    change = np.zeros(len(columns), dtype=np.int64)
    if pricing.program.obligations.purpose == "train":
        left = with_slack(pricing.placed.kept_bytes)
        whole = with_slack(pricing.placed.kept_without_recomputation)
        for kind, changes in kept_changes(left, whole).items():
            rows = np.flatnonzero(columns.kind == kind)
            change[rows] += changes[
                columns.stage[rows], pricing.placed.device_set_of_rank[columns.rank[rows]]
            ]
    return change


def working_bytes(pricing: Pricing) -> Ints:
    """Return the bytes that instructions take while they run, beside the live ones; shape (instructions,).

    These are the temporaries of backward passes and of optimizer steps.
    """
    columns = pricing.program.columns
    working = np.zeros(len(columns), dtype=np.int64)
    if pricing.program.obligations.purpose == "train":
        taken = with_slack(pricing.taken_bytes)
        rows = np.flatnonzero(is_any_of(columns.kind, _BACKWARDS))
        sets = pricing.placed.device_set_of_rank[columns.rank[rows]]
        working[rows] = taken[columns.stage[rows], sets]
        if pricing.plan.optimizer.step_states:
            rows = np.flatnonzero(columns.kind == STEP)
            sets = pricing.placed.device_set_of_rank[columns.rank[rows]]
            working[rows] = with_slack(_step_bytes(pricing))[columns.stage[rows], sets]
    return working


def _step_bytes(pricing: Pricing) -> Ints:
    """Return the bytes that a rank's step of a stage takes in temporary tensors; (stages, device sets)."""
    plan, graph, placed = pricing.plan, pricing.model.graph, pricing.placed
    each = plan.optimizer.step_states * STEPPED_BYTES[plan.precision]
    stepped = np.zeros((len(plan.stages), len(placed.device_sets)), dtype=np.int64)
    for index, devices in placed.places:
        parameters = stage_parameters(graph, plan.stages[index].layers, placed.shape(index, devices))
        stepped[index, devices] = -(-parameters // plan.sharers(index))
    return each * stepped


def _border_changes(pricing: Pricing) -> Ints:
    """Return changes by the largest tensors across segment borders, live to the end of the next segment."""
    columns, edges = pricing.program.columns, pricing.program.edges
    change = np.zeros(len(columns), dtype=np.int64)
    borders = segment_borders(pricing.program)
    if not len(borders):
        return change
    crosses = np.zeros(len(columns), dtype=np.bool_)
    crosses[borders] = True
    into, out = crosses[edges.target], crosses[edges.source]
    np.add.at(change, edges.source[into], with_slack(columns.most_bytes[edges.target[into]]))
    np.subtract.at(change, edges.target[out], with_slack(columns.most_bytes[edges.source[out]]))
    return change


def kept_by_segments(pricing: Pricing, method: str, elements: Callable[[int], float]) -> Ints:
    """Return the changes of bytes by what segments of a method keep, besides what whole passes do.

    `elements` are those that a micro-batch keeps in a stage. A stage that recomputes keeps at most what it
    keeps without recomputation. The input part of a backward pass makes all of that again.
    """
    plan, placed, columns = pricing.plan, pricing.placed, pricing.program.columns
    change = np.zeros(len(columns), dtype=np.int64)
    if cutter_of(pricing.program.obligations.methods) != method:
        return change
    again = np.array([[one.recompute != "none"] for one in plan.stages])
    size = np.array([[plan.element_bytes * round(elements(stage))] for stage in range(len(again))])
    spared = placed.kept_without_recomputation - placed.kept_bytes
    more = with_slack(np.where(again, np.minimum(size, spared), size))
    for kind, sign in ((FORWARD, 1), (BACKWARD, -1), (BACKWARD_INPUT, -1)):
        rows = np.flatnonzero(columns.kind == kind)
        change[rows] = sign * more[columns.stage[rows], placed.device_set_of_rank[columns.rank[rows]]]
    return change


def kept_changes(left: Ints, whole: Ints) -> Mapping[int, Ints]:
    """Return the changes of kept bytes by kind of computation: `left` by a forward, `whole` for weights.

    Where stages keep everything both are the same, and the input part of a backward changes nothing.
    """
    return {FORWARD: left, BACKWARD: -left, BACKWARD_INPUT: whole - left, BACKWARD_WEIGHT: -whole}


def _message_changes(pricing: Pricing) -> Ints:
    columns, edges = pricing.program.columns, pricing.program.edges
    change = np.zeros(len(columns), dtype=np.int64)
    payload = with_slack(columns.bytes)
    sends, receives = zip(*message_kinds(), strict=True)
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
