"""m-ETF and m-SCT: the earliest task first, with memory, and with favourite children.

At each tick, the operator that can start earliest on a free device starts there (Hwang et al., SIAM J.
Comput. 1989). Memory limits where it may (Baechi, SoCC 2020, section 3). With m-SCT, a device waits for the
favourite child of its last operator (Hanen and Munier, 1995). An urgent operator goes first.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import NamedTuple

from weft.planning.placement.board import UNPLACED, Board, Placement
from weft.planning.placement.graph import Devices, OperatorGraph


class _Start(NamedTuple):
    """A possible start; ties go to the first operator, then to the device that ends first.

    Devices that differ are thus taken by speed, and equal ones in their order.
    """

    tick: int
    operator: int
    taken: int
    device: int


_UNKNOWN = _Start(-1, UNPLACED, 0, UNPLACED)


def earliest_task_first(
    graph: OperatorGraph, devices: Devices, *, pinned: Sequence[int] | None = None
) -> Placement:
    """Place operators by m-ETF.

    Args:
        pinned: the device of each operator that has one, and `UNPLACED` for each other. Pinned operators
            keep room on their devices before others are placed.

    Raises:
        InputError: when an operator fits on no device.
    """
    return _ListScheduler(graph, devices, {}, pinned).run()


def small_communication_times(
    graph: OperatorGraph, devices: Devices, favourites: Mapping[int, int]
) -> Placement:
    """Place operators by m-SCT; `favourites` has the favourite child of operators, each child once.

    Raises:
        InputError: when an operator fits on no device.
    """
    return _ListScheduler(graph, devices, favourites, None).run()


class _ListScheduler:
    """Operators whose inputs are made wait in two heaps per device.

    Those in `_available` can start when the device is free, and the first one in the graph comes first. Those
    in `_pending` wait for transfers longer than that. An operator is in a heap of each device. Entries become
    void when it is placed, and where it does not fit. A device that lacks memory will always lack it.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        devices: Devices,
        favourites: Mapping[int, int],
        pinned: Sequence[int] | None,
    ) -> None:
        self._graph, self._favourites, self._pinned = graph, favourites, pinned
        self._board = Board(graph, devices)
        self._devices, self._count = range(devices.count), graph.operators
        self._queues = devices.communication != "parallel"
        self._groups: list[int] = graph.groups.tolist()
        self._unbound = pinned is None and len(set(self._groups)) == graph.operators
        self._missing = [len(before) for before in graph.predecessors]
        self._available: list[list[int]] = [[] for _ in self._devices]
        # Entries are tick * operators + operator: one number is compared faster than two.
        self._pending: list[list[int]] = [[] for _ in self._devices]
        self._running: list[tuple[int, int]] = []
        self._ready: dict[int, None] = {}
        # Devices that are free at the present tick.
        self._idle: list[int] = []
        self._last = [UNPLACED] * devices.count
        # Next starts on free devices, until something changes them; None if nothing waits.
        self._known: list[_Start | None] = [_UNKNOWN] * devices.count
        for operator, device in enumerate(pinned or ()):
            if device != UNPLACED:
                self._board.reserve(operator, device)

    def run(self) -> Placement:
        """Place every operator."""
        with _no_collection():
            self._place_all()
        if self._ready:
            operator = next(iter(self._ready))
            raise self._board.refuse(operator, UNPLACED if self._pinned is None else self._pinned[operator])
        return self._board.placement()

    def _place_all(self) -> None:
        """Place operators, tick by tick, until no device has a next start."""
        for operator, missing in enumerate(self._missing):
            if not missing:
                self._release(operator)
        free_at, now = self._board.free_at, 0 if self._ready else None
        while now is not None:
            while self._running and self._running[0][0] <= now:
                self._finish(heappop(self._running)[1])
            self._idle = [device for device, free in enumerate(free_at) if free <= now]
            while (start := self._first_start(now)) is not None and start.tick <= now:
                self._place(start)
                if free_at[start.device] > now:
                    self._idle.remove(start.device)
            ticks = [free for free in free_at if free > now]
            now = min(ticks if start is None else [start.tick, *ticks], default=None)

    def _release(self, operator: int) -> None:
        """Enter an operator whose inputs are made."""
        self._ready[operator] = None
        if self._favourites:
            self._forget_all()
        known, free_at, count = self._known, self._board.free_at, self._count
        for device, ready in enumerate(self._board.ready_everywhere(operator)):
            if ready <= free_at[device]:
                heappush(self._available[device], operator)
            else:
                heappush(self._pending[device], ready * count + operator)
            start = known[device]
            # Most devices are busy, and their next start is not known.
            if start is not _UNKNOWN:
                tick = max(ready, free_at[device])
                if (start is None or (tick, operator) < start[:2]) and self._may_go(operator, device):
                    known[device] = self._start(tick, operator, device)

    def _finish(self, operator: int) -> None:
        for reader in self._graph.successors[operator]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._release(reader)

    def _may_go(self, operator: int, device: int) -> bool:
        """Return True if an operator that is not placed may still be placed on a device."""
        if not self._unbound:
            if self._pinned is not None and self._pinned[operator] not in (UNPLACED, device):
                return False
            if self._board.pinned(operator) not in (UNPLACED, device):
                return False
        return not self._board.missing_bytes(operator, device)

    def _place(self, start: _Start) -> None:
        operator, device = start.operator, start.device
        sent = self._board.place(operator, device)
        del self._ready[operator]
        self._last[device] = operator
        self._forget(operator, device)
        heappush(self._running, (self._board.end[operator], operator))
        if self._queues:
            # Others that read these tensors may start earlier now, as no second transfer is needed.
            for reader in {one for tensor in sent for one in self._graph.readers[tensor]}:
                if reader in self._ready and self._may_go(reader, device):
                    self._wait(reader, device, self._board.ready_at(reader, device))

    def _forget(self, operator: int, device: int) -> None:
        """Forget next starts that a placed operator changes: where it, or one of its group, came next.

        Whether a device waits for a favourite child depends on all other devices.
        """
        if self._favourites:
            self._forget_all()
        known, groups = self._known, self._groups
        group = groups[operator]
        known[device] = _UNKNOWN
        for other in self._idle:
            start = known[other]
            if start is not None and groups[start.operator] == group:
                known[other] = _UNKNOWN

    def _forget_all(self) -> None:
        self._known = [_UNKNOWN] * len(self._devices)

    def _first_start(self, now: int) -> _Start | None:
        """Return the earliest start on an idle device, perhaps later than now; None if nothing waits."""
        known, first = self._known, None
        for device in self._idle:
            start = known[device]
            if start is _UNKNOWN:
                start = self._start_on(device, now)
            if start is not None and (first is None or start < first):
                first = start
        return first

    def _start_on(self, device: int, now: int) -> _Start | None:
        """Return the next start on a free device, perhaps later than now; None if nothing waits for it."""
        if self._favourites and (favourite := self._favourite(device)) is not None:
            return self._awake(device, favourite, now)
        start = self._earliest(device)
        if not self._queues:
            self._known[device] = start
        return start

    def _earliest(self, device: int) -> _Start | None:
        """Return the earliest start of any waiting operator on a device."""
        free, pending, available = self._board.free_at[device], self._pending[device], self._available[device]
        count, waiting = self._count, self._ready
        roomy = self._unbound and self._board.has_room_for_any(device)
        by_then = (free + 1) * count
        while pending and pending[0] < by_then:
            # Most operators are placed elsewhere by then.
            if (operator := heappop(pending) % count) in waiting:
                heappush(available, operator)
        while available:
            operator = available[0]
            if operator not in waiting or not (roomy or self._may_go(operator, device)):
                heappop(available)
            elif self._queues and (ready := self._board.ready_at(operator, device)) > free:
                heappop(available)
                self._wait(operator, device, ready)
            else:
                return self._start(free, operator, device)
        while pending:
            known, operator = divmod(pending[0], count)
            if operator not in waiting or not (roomy or self._may_go(operator, device)):
                heappop(pending)
            elif self._queues and (ready := self._board.ready_at(operator, device)) != known:
                heappop(pending)
                # An earlier entry was pushed when its tensors were sent.
                if ready > known:
                    self._wait(operator, device, ready)
            else:
                return self._start(max(known, free), operator, device)
        return None

    def _wait(self, operator: int, device: int, ready: int) -> None:
        """Enter an operator that a device has the inputs of at a later tick."""
        heappush(self._pending[device], ready * self._count + operator)

    def _start(self, tick: int, operator: int, device: int) -> _Start:
        return _Start(tick, operator, self._board.ticks_of(operator, device), device)

    def _favourite(self, device: int) -> int | None:
        """Return the child that a device waits for: the favourite of its last operator, nowhere earlier."""
        child = self._favourites.get(self._last[device])
        if child not in self._ready or not self._may_go(child, device):
            return None
        here = self._starts_at(child, device)
        others = (self._starts_at(child, one) for one in self._devices if self._may_go(child, one))
        return child if here <= min(others) else None

    def _starts_at(self, operator: int, device: int) -> int:
        return max(self._board.ready_at(operator, device), self._board.free_at[device])

    def _awake(self, device: int, favourite: int, now: int) -> _Start:
        """Return the start on a device that waits for a favourite child, unless an operator is urgent.

        An operator is urgent when it could start on any device without waiting. It then starts as early as
        the waiting device allows, which may be before now.
        """
        own = self._start(self._starts_at(favourite, device), favourite, device)
        if max(now + 1, own.tick) <= self._busy_until():
            return own
        urgent = [
            self._start(
                max(self._starts_at(one, other) for other in self._devices if self._may_go(one, other)),
                one,
                device,
            )
            for one in self._ready
            if self._may_go(one, device)
        ]
        first = min(urgent)
        if first.tick <= now:
            return self._start(self._starts_at(first.operator, device), first.operator, device)
        return own if own.tick <= now else min(own, first)

    def _busy_until(self) -> int:
        """Return a tick before which no operator is urgent; 0 where operators may be bound to devices.

        Each operator could also start on a device that is busy until then.
        """
        if not self._unbound:
            return 0
        places = zip(self._board.free_at, self._devices, strict=True)
        return max((free for free, one in places if self._board.has_room_for_any(one)), default=0)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector out of a scheduler's run.

    The run makes many tuples that stay, and no cycles. Looking for these took an eighth of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
