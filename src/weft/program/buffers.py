"""Which gathers and reductions a compute order needs when weights and gradients live in a few shared buffers.

The rule of fully sharded data parallelism in a looped pipeline (Lamy-Poirier, arXiv 2211.05953, and
Fast-LLM): the j-th local stage of a device uses weight buffer j mod n and gradient buffer j mod n. Weights
are gathered whenever a buffer's content changes, gradients are reduced before another stage takes their
buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.program.kinds import MAKES_GRADIENTS, READS_WEIGHTS, STEP, kinds_reading
from weft.program.program import Columns
from weft.program.schedules.base import ComputeOrder

# Of weights and of gradients, where replicas share these out.
SHARDED_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class BufferEvent:
    """A gather or a reduction of one stage.

    Attributes:
        stage: whose weights or gradients.
        after: position in the order of the computation that it can follow at once, -1 for the step's start:
            for a gather the last one that used the buffer's former content, for a reduction the last one
            that added to the gradient.
        before: position of the first computation that needs it; the order's length where none does.
        part: how many events of the same kind and stage came before in the step. From the second reduction
            on, a stage accumulates into its shard.
    """

    stage: int
    after: int
    before: int
    part: int


def gathers(order: ComputeOrder, buffers: int) -> list[BufferEvent]:
    """Return the gathers of one step of a device, in the order in which they are needed.

    Every step begins with stale buffers, because the optimizer has changed the weights.
    """
    return _changes(order, buffers, READS_WEIGHTS, at_change=True)


def reductions(order: ComputeOrder, buffers: int) -> list[BufferEvent]:
    """Return the reductions of one step of a device, in the order in which their gradients are ready."""
    return _changes(order, buffers, MAKES_GRADIENTS, at_change=False)


def last_gradients(columns: Columns, rows: range) -> frozenset[int]:
    """Of one rank's rows, the computations after which their stage's gradient is reduced or stepped with."""
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
    """Follow the content of every buffer; an event per stage that enters (`at_change`) or leaves one."""
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
