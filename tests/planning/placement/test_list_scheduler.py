"""m-ETF and m-SCT with heaps choose what the same rules choose without any."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_operators import devices_of, graph_of, questions

from weft.errors import InputError
from weft.planning.placement.board import UNPLACED, Board
from weft.planning.placement.favourites import _matched
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first, small_communication_times
from weft.planning.placement.verification import check_placement, replayed


class Plain:
    """The rules of Baechi's code, which looks at all ready operators on all devices at every tick."""

    def __init__(self, graph: OperatorGraph, devices: Devices, favourites: Mapping[int, int]) -> None:
        self.graph, self.favourites = graph, favourites
        self.board, self.places = Board(graph, devices), range(devices.count)
        self.last = [UNPLACED] * devices.count
        self.finished: set[int] = set()

    def fits(self, operator: int) -> list[int]:
        """The devices that may still have an operator."""
        home = self.board.pinned(operator)
        allowed = [one for one in self.places if home in (UNPLACED, one)]
        return [one for one in allowed if not self.board.missing_bytes(operator, one)]

    def start(self, operator: int, device: int) -> int:
        return max(self.board.ready_at(operator, device), self.board.free_at[device])

    def ready(self) -> list[int]:
        placed = set(self.board.sequence)
        return [
            one
            for one, before in enumerate(self.graph.predecessors)
            if one not in placed and self.finished.issuperset(before)
        ]

    def choice(self, device: int, now: int) -> tuple[int, int] | None:
        """The tick at which a free device acts, and the operator."""
        here = [one for one in self.ready() if device in self.fits(one)]
        if not here:
            return None
        child = self.favourites.get(self.last[device])
        if child in here and self.start(child, device) == min(
            self.start(child, one) for one in self.fits(child)
        ):
            urgent = min((max(self.start(one, other) for other in self.fits(one)), one) for one in here)
            if urgent[0] <= now or self.start(child, device) > now:
                return min(urgent, (self.start(child, device), child)) if urgent[0] > now else urgent
            return self.start(child, device), child
        return min((self.start(one, device), one) for one in here)

    def run(self) -> Board:
        now: int | None = 0
        while now is not None:
            self.finished = {one for one in self.board.sequence if self.board.end[one] <= now}
            while True:
                choices = []
                for device in self.places:
                    free = self.board.free_at[device] <= now
                    if free and (found := self.choice(device, now)) and found[0] <= now:
                        taken = self.board.ticks_of(found[1], device)
                        choices.append((self.start(found[1], device), found[1], taken, device))
                if not choices:
                    break
                _, operator, _, device = min(choices)
                self.board.place(operator, device)
                self.last[device] = operator
            ticks = []
            for device in self.places:
                if self.board.free_at[device] > now:
                    ticks.append(self.board.free_at[device])
                elif found := self.choice(device, now):
                    ticks.append(found[0])
            now = min(ticks, default=None)
        return self.board


@given(asked=questions(grouped=True), seed=st.integers(0, 10**6), with_favourites=st.booleans())
def test_heaps_change_no_choice(
    asked: tuple[OperatorGraph, Devices], seed: int, with_favourites: bool
) -> None:
    graph, devices = asked
    order = np.random.default_rng(seed).permutation(len(graph.edges))
    chosen = graph.edges[_matched(graph.edges, order)] if with_favourites else graph.edges[:0]
    children = {int(parent): int(child) for parent, child in chosen}
    plain = Plain(graph, devices, children).run()
    try:
        placement = small_communication_times(graph, devices, children)
    except InputError:
        assert len(plain.sequence) < graph.operators
        return
    assert plain.sequence == placement.sequence.tolist()
    assert plain.start == placement.start.tolist()
    assert check_placement(graph, devices, placement) == []
    assert replayed(graph, devices, placement).makespan == placement.makespan


def test_a_device_waits_for_its_favourite_child() -> None:
    # 2 reads 0, which device 0 has at tick 2, and 1, whose tensor is there at tick 4. The earliest task first
    # fills tick 2 with 5, which takes three ticks, and 3 after 2 is late.
    ticks = [[one, one] for one in (2, 1, 3, 10, 9, 3)]
    graph = graph_of(ticks, [(0, 9, [2]), (1, 3, [2]), (2, 9, [3])])
    devices = devices_of(2, latency=0.0, per_byte=1.0)
    assert earliest_task_first(graph, devices).start.tolist() == [0, 0, 5, 8, 1, 2]
    waits = small_communication_times(graph, devices, {0: 2})
    assert waits.start.tolist() == [0, 0, 4, 7, 1, 10]
    assert waits.device.tolist() == [0, 1, 0, 0, 1, 1]


def test_what_arrives_when_a_device_becomes_free_is_there_in_time() -> None:
    # At tick 4 device 0 has run 4. What 3 reads arrives just then, and 5 could start since tick 2.
    ticks = [[2, 2], [2, 2], [9, 8], [3, 3], [2, 2], [3, 3]]
    graph = graph_of(ticks, [(0, 0, [4, 5]), (1, 0, [3])])
    placement = earliest_task_first(graph, devices_of(2, latency=2.0))
    assert placement.device.tolist() == [0, 1, 1, 0, 0, 0]
    assert placement.start.tolist() == [0, 0, 2, 4, 2, 7]


def test_an_idle_device_takes_what_comes_before_what_it_waits_for() -> None:
    # From tick 2 on device 0 waits for what 4 reads, until tick 10. At tick 5 the end of 2 releases 5 and 6.
    ticks = [[one] * 3 for one in (2, 2, 5, 6, 1, 9, 9)]
    graph = graph_of(ticks, [(1, 8, [3, 4]), (2, 0, [5, 6])])
    placement = earliest_task_first(graph, devices_of(3, latency=0.0, per_byte=1.0))
    assert placement.device.tolist() == [0, 1, 2, 1, 1, 0, 2]
    assert placement.start.tolist() == [0, 0, 0, 2, 8, 5, 5]


@given(asked=questions(communications=["sequential", "links"]))
def test_transfers_for_one_operator_wait_for_each_other(asked: tuple[OperatorGraph, Devices]) -> None:
    """A question of when an operator could start is answered by placing it."""
    graph, devices = asked
    board = Board(graph, devices)
    for operator in range(graph.operators):
        device = operator % devices.count
        expected = max(board.ready_at(operator, device), board.free_at[device])
        board.place(operator, device)
        assert board.start[operator] == expected


def test_an_operator_that_fits_nowhere_else_is_urgent() -> None:
    # As above, but 5 has no room on device 1: that it is busy gives device 0 no reason to wait.
    ticks = [[one, one] for one in (2, 1, 3, 10, 9, 3)]
    tensors = [(0, 9, [2]), (1, 3, [2]), (2, 9, [3])]
    graph = graph_of(ticks, tensors, permanent=(0, 0, 0, 0, 0, 50))
    devices = devices_of(2, [100, 40], latency=0.0, per_byte=1.0)
    assert small_communication_times(graph, devices, {0: 2}).start.tolist() == [0, 0, 5, 8, 1, 2]


def test_operators_of_decided_devices_stay_there() -> None:
    graph = graph_of([[1, 1]] * 4, [(0, 0, [2]), (1, 0, [3])])
    placement = earliest_task_first(graph, devices_of(2), pinned=[1, 0, 1, 0])
    assert placement.device.tolist() == [1, 0, 1, 0]
    assert placement.makespan == 2


def test_a_placed_member_changes_where_its_group_comes_next() -> None:
    # 2 and 3 are one group. At tick 2 device 0 has what 2 reads and device 1 what 3 reads.
    graph = graph_of([[2, 2], [2, 2], [3, 3], [3, 3]], [(0, 10, [2]), (1, 10, [3])], groups=(0, 1, 2, 2))
    placement = earliest_task_first(graph, devices_of(2, latency=0.0, per_byte=1.0))
    assert placement.device.tolist() == [0, 1, 0, 0]
    assert placement.start.tolist() == [0, 0, 2, 12]
