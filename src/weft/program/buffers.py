"""Gathers and reductions of a compute order with weights and gradients in a few shared buffers.

The rule is that of fully sharded data parallelism in a looped pipeline (Lamy-Poirier, arXiv 2211.05953, and
Fast-LLM). The j-th local stage of a device uses weight buffer j mod n and gradient buffer j mod n. Weights
are gathered whenever a buffer's content changes. Gradients are reduced before another stage takes their
buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.program.kinds import MAKES_GRADIENTS, READS_WEIGHTS, STEP, kinds_reading
from weft.program.program import Columns
from weft.program.schedules.base import ComputeOrder

# Number of weight buffers, and of gradient buffers, where replicas shard them.
SHARDED_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class BufferEvent:
    """A gather or a reduction of one stage.

    Attributes:
        stage: the stage of the weights or gradients.
        after: position in the order of the computation that it can follow at once, -1 for the step's start.
            A gather follows the last user of the buffer's former content. A reduction follows the last
            computation that added to the gradient.
        before: position of the first computation that needs it; the order's length for none.
        part: number of earlier events of the same kind and stage in the step. From the second reduction on, a
            stage accumulates into its shard.
    """

    stage: int
    after: int
    before: int
    part: int


def gathers(order: ComputeOrder, buffers: int) -> list[BufferEvent]:
    """Return the gathers of one step of a device, in the order of their users.

    Every step begins with stale buffers, because the optimizer has changed the weights.
    """
    return _changes(order, buffers, READS_WEIGHTS, at_change=True)


def reductions(order: ComputeOrder, buffers: int) -> list[BufferEvent]:
    """Return the reductions of one step of a device, in the order of their last computations."""
    return _changes(order, buffers, MAKES_GRADIENTS, at_change=False)


def last_gradients(columns: Columns, rows: range) -> frozenset[int]:
    """Return the last computations of one rank's rows before each reduction or step of their gradient."""
    takes = {*kinds_reading("weight_gradient"), STEP}
    last: dict[int, int] = {}
    found = set()
    for row in rows:
        kind, stage = int(columns.kind[row]), int(columns.stage[row])
        if kind in MAKES_GRADIENTS:
            last[stage] = row
        elif kind in takes and stage in last:
            found.add(last.pop(stage))
    return frozenset(found)


def _changes(
    order: ComputeOrder, buffers: int, kinds: tuple[int, ...], *, at_change: bool
) -> list[BufferEvent]:
    """Follow every buffer and return an event for each stage that enters (`at_change`) or leaves it."""
    local = {stage: index for index, stage in enumerate(sorted(set(order.stage.tolist())))}
    content: dict[int, int] = {}
    last_use: dict[int, int] = {}
    parts: dict[int, int] = {}
    events: list[BufferEvent] = []

    def add(stage: int, after: int, before: int) -> None:
        part = parts.get(stage, 0)
        parts[stage] = part + 1
        events.append(BufferEvent(stage, after, before, part))

    for position, (kind, stage) in enumerate(zip(order.kind.tolist(), order.stage.tolist(), strict=True)):
        if kind not in kinds:
            continue
        buffer = local[stage] % buffers
        held = content.get(buffer)
        if held != stage:
            if at_change:
                add(stage, last_use.get(buffer, -1), position)
            elif held is not None:
                add(held, last_use[buffer], position)
            content[buffer] = stage
        last_use[buffer] = position
    if not at_change:
        for buffer, held in sorted(content.items(), key=lambda item: last_use[item[0]]):
            add(held, last_use[buffer], len(order.kind))
    return events
