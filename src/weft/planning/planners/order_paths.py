"""The longest path of a step through the computations and messages of an order.

An order is made and sorted once for all layouts that compute in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.program import NONE
from weft.program.schedules.base import Options, Pipeline, Schedule, placements

# The turn of each kind among the durations of all stages.
_TURNS = {FORWARD: 0, BACKWARD: 1, BACKWARD_INPUT: 2, BACKWARD_WEIGHT: 3}
# Kind, stage, micro-batch and path of a computation.
_Computation = tuple[int, int, int, int]
# Device, duration, queue of its message or -1, and the computation whose message it waits for or -1.
_Waiting = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class OrderPaths:
    """The computations of one pipeline, a chain of stages, each after those that it waits for.

    Attributes:
        computations: their devices, durations and waits; see `longest_s`.
        devices: the number of devices.
        ends: the device of the first stage on the first path.
        last: the duration of its last computation; -1 unless it begins and ends with the first stage.
        returned: by path, the backward passes of its first stage before the last forward pass there.
    """

    computations: Sequence[_Waiting]
    devices: int
    ends: int
    last: int
    returned: tuple[int, ...]

    def longest_s(self, durations: Sequence[float], busy: Sequence[float], latency: Sequence[float]) -> float:
        """Return the seconds from the first computation of the device `ends` to the end of its last one.

        Args:
            durations: of all stages forward, then backward, then of both parts of a split backward.
            busy: of the messages from every stage to the next one, path by path, then of those back. One of
                them is under way at a time.
            latency: of the same messages, until they arrive.
        """
        never = float("-inf")
        free, sent = [never] * self.devices, [never] * len(busy)
        free[self.ends] = 0.0
        arrived: list[float] = []
        for device, duration, queue, source in self.computations:
            start = free[device]
            if source >= 0 and arrived[source] > start:
                start = arrived[source]
            free[device] = end = start + durations[duration]
            if queue >= 0:
                sent[queue] = max(end, sent[queue]) + busy[queue]
                end = sent[queue] + latency[queue]
            arrived.append(end)
        return free[self.ends]


def order_paths(schedule: Schedule, pipeline: Pipeline, options: Options) -> OrderPaths:
    """Return the paths of a schedule's order."""
    homes = placements(schedule, pipeline).tolist()
    orders: list[list[_Computation]] = []
    for device in range(pipeline.devices):
        order = schedule.order(pipeline, device, options)
        path = order.micro_batch * len(homes) // pipeline.micro_batches
        orders.append(list(zip(*(column.tolist() for column in (*order, path)), strict=True)))
    begins, (kind, stage, *_) = orders[homes[0][0]][0][1], orders[homes[0][0]][-1]
    return OrderPaths(
        computations=list(_in_time(orders, homes)),
        devices=pipeline.devices,
        ends=homes[0][0],
        last=_TURNS[kind] * pipeline.stages if begins == stage == 0 else NONE,
        returned=tuple(_returned(orders[row[0]], path) for path, row in enumerate(homes)),
    )


def _in_time(orders: Sequence[Sequence[_Computation]], homes: Sequence[Sequence[int]]) -> Iterator[_Waiting]:
    """Yield all computations after those that they wait for; `homes` has the devices of stages by path."""
    stages = len(homes[0])
    # By (backward, stage, micro-batch): the numbers of computations, and the devices that wait for them.
    done: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    reached, ready, count = [0] * len(orders), list(range(len(orders))), 0
    while ready:
        device = ready.pop()
        for kind, stage, micro_batch, path in orders[device][reached[device] :]:
            back, source = kind != FORWARD, NONE
            near, far = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
            if kind != BACKWARD_WEIGHT and 0 <= near < stages and homes[path][near] != device:
                needed = back, near, micro_batch
                if needed not in done:
                    waiting[needed] = device
                    break
                source = done[needed]
            queue = NONE
            if kind != BACKWARD_WEIGHT and 0 <= far < stages and homes[path][far] != device:
                queue = (back * len(homes) + path) * stages + min(stage, far)
            yield device, _TURNS[kind] * stages + stage, queue, source
            made = back, stage, micro_batch
            # The input part of a split backward pass, which comes first, makes the message.
            done.setdefault(made, count)
            if made in waiting:
                ready.append(waiting.pop(made))
            reached[device] += 1
            count += 1


def _returned(order: Sequence[_Computation], path: int) -> int:
    """Return the number of backward passes of a path's first stage before the last forward pass there."""
    kinds = [kind for kind, stage, _, on in order if stage == 0 and on == path and kind != BACKWARD_WEIGHT]
    last = max(place for place, kind in enumerate(kinds) if kind == FORWARD)
    return last + 1 - kinds.count(FORWARD)
