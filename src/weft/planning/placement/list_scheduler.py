"""m-ETF and m-SCT: the earliest task first, with memory, and with favourite children.

At each tick, the operator that can start earliest on a free device starts there (Hwang et al., SIAM J.
Comput. 1989). Memory limits where it may (Baechi, SoCC 2020, section 3). With m-SCT, a device waits for the
favourite child of its last operator (Hanen and Munier, 1995). An urgent operator goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._devices = range(devices.count)
        self._queues = devices.communication != "parallel"
        self._groups: list[int] = graph.groups.tolist()
        self._unbound = pinned is None and len(set(self._groups)) == graph.operators
        self._missing = [len(before) for before in graph.predecessors]
        self._available: list[list[int]] = [[] for _ in self._devices]
        self._pending: list[list[tuple[int, int]]] = [[] for _ in self._devices]
        self._running: list[tuple[int, int]] = []
        self._ready: dict[int, None] = {}
        self._last = [UNPLACED] * devices.count
        # Next starts on free devices, until something changes them.
        self._known: dict[int, _Start | None] = {}
        for operator, device in enumerate(pinned or ()):
            if device != UNPLACED:
                self._board.reserve(operator, device)

    def run(self) -> Placement:
        """Place every operator."""
        for operator, missing in enumerate(self._missing):
            if not missing:
                self._release(operator)
        now: int | None = 0
        while now is not None:
            while self._running and self._running[0][0] <= now:
                self._finish(heappop(self._running)[1])
            while (start := self._first_start(now)) is not None:
                self._place(start)
            now = self._next_tick(now)
        if self._ready:
            operator = next(iter(self._ready))
            raise self._board.refuse(operator, UNPLACED if self._pinned is None else self._pinned[operator])
        return self._board.placement()

    def _release(self, operator: int) -> None:
        """Enter an operator whose inputs are made."""
        self._ready[operator] = None
        if self._favourites:
            self._known.clear()
        free_at = self._board.free_at
        for device, ready in enumerate(self._board.ready_everywhere(operator)):
            if ready <= free_at[device]:
                heappush(self._available[device], operator)
            else:
                heappush(self._pending[device], (ready, operator))
            if device in self._known:
                self._come_earlier(device, max(ready, free_at[device]), operator)

    def _come_earlier(self, device: int, tick: int, operator: int) -> None:
        """Have a released operator as the next start on a device if it is earlier than the known one."""
        known = self._known[device]
        if (known is None or (tick, operator) < known[:2]) and self._is_open(operator, device):
            self._known[device] = self._start(tick, operator, device)

    def _finish(self, operator: int) -> None:
        for reader in self._graph.successors[operator]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._release(reader)

    def _is_open(self, operator: int, device: int) -> bool:
        """Return True if an operator may still be placed on a device."""
        if operator not in self._ready:
            return False
        if self._pinned is not None and self._pinned[operator] not in (UNPLACED, device):
            return False
        home = self._board.pinned(operator)
        return home in (UNPLACED, device) and not self._board.missing_bytes(operator, device)

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
                if self._is_open(reader, device):
                    heappush(self._pending[device], (self._board.ready_at(reader, device), reader))

    def _forget(self, operator: int, device: int) -> None:
        """Forget next starts that a placed operator changes: where it, or one of its group, came next.

        Whether a device waits for a favourite child depends on all other devices.
        """
        groups = self._groups
        for other, start in [*self._known.items()]:
            alike = start is not None and groups[start.operator] == groups[operator]
            if other == device or alike or self._favourites:
                del self._known[other]

    def _first_start(self, now: int) -> _Start | None:
        """Return the earliest start on a free device that is possible by now."""
        known, first = self._known, None
        for device, free in enumerate(self._board.free_at):
            if free <= now:
                # Most devices have a known start: here, each call counts.
                start = known[device] if device in known else self._start_on(device, now)
                if start is not None and start.tick <= now and (first is None or start < first):
                    first = start
        return first

    def _start_on(self, device: int, now: int) -> _Start | None:
        """Return the next start on a free device, perhaps later than now; None if nothing waits for it."""
        if device in self._known:
            return self._known[device]
        if self._favourites and (favourite := self._favourite(device)) is not None:
            return self._awake(device, favourite, now)
        start = self._earliest(device)
        if not self._queues:
            self._known[device] = start
        return start

    def _earliest(self, device: int) -> _Start | None:
        """Return the earliest start of any waiting operator on a device."""
        free, pending, available = self._board.free_at[device], self._pending[device], self._available[device]
        while pending and pending[0][0] <= free:
            heappush(available, heappop(pending)[1])
        while available:
            operator = available[0]
            if not self._is_open(operator, device):
                heappop(available)
            elif self._queues and (ready := self._board.ready_at(operator, device)) > free:
                heappop(available)
                heappush(pending, (ready, operator))
            else:
                return self._start(free, operator, device)
        while pending:
            known, operator = pending[0]
            if not self._is_open(operator, device):
                heappop(pending)
            elif self._queues and (ready := self._board.ready_at(operator, device)) != known:
                heappop(pending)
                # An earlier entry was pushed when its tensors were sent.
                if ready > known:
                    heappush(pending, (ready, operator))
            else:
                return self._start(max(known, free), operator, device)
        return None

    def _start(self, tick: int, operator: int, device: int) -> _Start:
        return _Start(tick, operator, self._board.ticks_of(operator, device), device)

    def _favourite(self, device: int) -> int | None:
        """Return the child that a device waits for: the favourite of its last operator, nowhere earlier."""
        child = self._favourites.get(self._last[device])
        if child is None or not self._is_open(child, device):
            return None
        here = self._starts_at(child, device)
        others = (self._starts_at(child, one) for one in self._devices if self._is_open(child, one))
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
                max(self._starts_at(one, other) for other in self._devices if self._is_open(one, other)),
                one,
                device,
            )
            for one in self._ready
            if self._is_open(one, device)
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

    def _next_tick(self, now: int) -> int | None:
        """Return the next tick at which a device is free or an operator may start; None after all."""
        ticks = []
        for device, free in enumerate(self._board.free_at):
            if free > now:
                ticks.append(free)
            elif (start := self._start_on(device, now)) is not None:
                ticks.append(start.tick)
        return min(ticks, default=None)
