"""Every kind of wrong placement is found, and nothing is said of a right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from random_operators import devices_of, graph_of

from weft.planning.placement.board import Placement, Transfer
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.verification import check_placement, scheduled

# Operator 0 on device 0 makes two tensors; 1 and 2 read one each on device 1, and 3 follows 0 where it is.
GRAPH = graph_of(
    [[2, 2]] * 4, [(0, 3, [1]), (0, 3, [2]), (0, 1, [3])], permanent=(1, 1, 1, 1), groups=(0, 1, 1, 2)
)
HOMES = np.array([0, 1, 1, 0])


def placement(devices: Devices) -> Placement:
    return scheduled(GRAPH, devices, HOMES, np.arange(4))


def found(devices: Devices, wrong: Placement, graph: OperatorGraph = GRAPH) -> str:
    return "\n".join(str(one) for one in check_placement(graph, devices, wrong))


@pytest.mark.parametrize("communication", ["parallel", "sequential", "links"])
def test_nothing_is_wrong_with_a_schedule(communication: str) -> None:
    devices = devices_of(2, communication=communication)  # type: ignore[arg-type]
    right = placement(devices)
    assert found(devices, right) == ""
    # Transfers of one tick from tick 2 on; in a queue the second one waits.
    assert right.start.tolist() == [0, 3, 5, 2]
    assert [one.start for one in right.transfers] == ([2, 2] if communication == "parallel" else [2, 3])


def changed(array: np.ndarray, index: int, by: int) -> np.ndarray:
    array = array.copy()
    array[index] += by
    return array


def moved(one: Placement, operator: int, by: int) -> Placement:
    return replace(one, start=changed(one.start, operator, by), end=changed(one.end, operator, by))


def resent(one: Placement, number: int, **fields: int) -> Placement:
    transfers = [*one.transfers]
    transfers[number] = transfers[number]._replace(**fields)
    return replace(one, transfers=tuple(transfers))


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("'operator 3' does not take 2 ticks", lambda one: replace(one, end=changed(one.end, 3, 1))),
        ("'operator 2' starts before 'operator 1' ends", lambda one: moved(one, 2, -1)),
        ("'operator 1' starts before it has what 'operator 0' makes", lambda one: moved(one, 1, -1)),
        ("'operator 3' starts before it has what 'operator 0' makes", lambda one: moved(one, 3, -1)),
        ("does not take 1 ticks", lambda one: resent(one, 0, end=9)),
        ("leaves before it is there", lambda one: resent(one, 1, start=1, end=2)),
        ("sent more often", lambda one: replace(one, transfers=(*one.transfers, Transfer(0, 0, 1, 5, 6)))),
        ("'operator 2' starts before it has", lambda one: replace(one, transfers=one.transfers[:1])),
        ("group 1 is on devices [0, 1]", lambda one: replace(one, device=np.array([0, 1, 0, 0]))),
        ("not as it says", lambda one: replace(one, peak_bytes=one.peak_bytes + 1)),
        ("each of 4 operators once", lambda one: replace(one, sequence=np.array([0, 1, 2, 2]))),
        ("'operator 0' is on none of 2 devices", lambda one: replace(one, device=one.device - 1)),
    ],
)
def test_what_is_wrong_is_named(words: str, spoil: Callable[[Placement], Placement]) -> None:
    devices = devices_of(2)
    assert words in found(devices, spoil(placement(devices)))


@pytest.mark.parametrize("communication", ["sequential", "links"])
def test_transfers_side_by_side_share_a_channel(communication: str) -> None:
    side_by_side = placement(devices_of(2))
    devices = devices_of(2, communication=communication)  # type: ignore[arg-type]
    assert "transfers share the channel of devices" in found(devices, side_by_side)


def test_missing_memory_is_named() -> None:
    # Device 1 keeps 2 bytes, and 6 arrive.
    assert found(devices_of(2, [8, 7]), placement(devices_of(2))) == "placement: device 1 lacks 1 B"
