"""Groups: every exchange fills what it is given, through host memory or where tensors lie."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from weft.run.transport.device_group import DeviceGroup
from weft.run.transport.host_group import HostGroup, bring_back, host_room


def test_on_a_cpu_the_room_is_the_tensor_itself() -> None:
    tensor = torch.ones(2)
    assert host_room(tensor) is tensor
    bring_back(tensor, tensor)
    assert host_room(torch.empty(2, device="meta")).device.type == "cpu"


def exchange(rank: int, ranks: int, kind: type[DeviceGroup]) -> list[list[float]]:
    group = kind(dist.new_group())
    assert (group.place, group.size) == (rank, ranks)
    mine = torch.arange(ranks, dtype=torch.float32) + 10.0 * rank
    total, gathered, taken = mine.clone(), torch.empty(ranks * ranks), torch.empty(ranks)
    added = mine.clone()
    # Every second element: not contiguous.
    table = torch.full((ranks, 2), float(rank))[:, 0]
    group.all_reduce(total)
    group.all_gather(gathered, mine)
    group.all_to_all(taken, mine)
    group.broadcast(table, 1)
    passed = torch.empty(1)
    if rank == 0:
        group.send(torch.tensor([5.0]), 1)
    if rank == 1:
        group.receive(passed, 0)
        assert passed.item() == 5.0
    group.add_up(added)
    share = group.reduce_scatter(mine)
    group.close()
    return [one.tolist() for one in (total, gathered, taken, table, added, share)]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [HostGroup, DeviceGroup])
def test_every_exchange_fills_what_it_is_given(worker_pool: WorkerPool, kind: type[DeviceGroup]) -> None:
    for rank, results in enumerate(worker_pool.run(exchange, kind, ranks=3)):
        total, gathered, taken, table, added, share = results
        assert total == added == [30.0, 33.0, 36.0]
        assert share == [total[rank]]
        assert gathered == [10.0 * source + place for source in range(3) for place in range(3)]
        assert taken == [10.0 * source + rank for source in range(3)]
        assert table == [1.0] * 3


def exchange_large(rank: int, ranks: int) -> tuple[list[list[float]], list[float]]:
    """The values of the parts that a rank receives, equal ones and unequal ones."""
    group, part = HostGroup(dist.new_group()), 1 << 16
    given = torch.arange(ranks, dtype=torch.float32).add(10.0 * rank).repeat_interleave(part)
    taken = torch.empty(ranks * part)
    group.all_to_all(taken, given)
    # Rank r sends s + 1 rows of r to rank s.
    rows = torch.full((sum(range(1, ranks + 1)), 2), float(rank))
    found = torch.empty(ranks * (rank + 1), 2)
    group.all_to_all_rows(found, rows, [rank + 1] * ranks, list(range(1, ranks + 1)))
    return [one.unique().tolist() for one in taken.chunk(ranks)], found[:, 1].tolist()


@pytest.mark.processes
def test_large_parts_and_rows_arrive_from_their_ranks(worker_pool: WorkerPool) -> None:
    for rank, (parts, rows) in enumerate(worker_pool.run(exchange_large, ranks=3)):
        assert parts == [[10.0 * source + rank] for source in range(3)]
        assert rows == [float(source) for source in range(3) for _ in range(rank + 1)]


class Calls:
    """A torch group, the second of three ranks, that only notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def size(self) -> int:
        return 3

    def rank(self) -> int:
        return 1

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Calls:
        self.asked.append(f"receive {len(tensors[0])} from {source}")
        return self

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Calls:
        self.asked.append(f"send {len(tensors[0])} to {target}")
        return self

    def wait(self) -> None:
        self.asked.append("wait")


def test_rows_are_received_before_they_are_sent() -> None:
    """A peer may then send at once, and both directions of a link are busy; empty parts are no messages."""
    calls = Calls()
    group = HostGroup(calls, (0, 1, 2))  # type: ignore[arg-type]
    taken, given = torch.zeros(7, 2), torch.arange(8.0).view(4, 2)
    group.all_to_all_rows(taken, given, [4, 1, 2], [0, 1, 3])
    assert calls.asked == ["receive 4 from 0", "receive 2 from 2", "send 3 to 2", *["wait"] * 3]
    assert taken[4].tolist() == given[0].tolist()
    calls.asked.clear()
    # As do equal parts of 256 KiB; gloo exchanges smaller ones.
    group.all_to_all(torch.zeros(3 << 16), torch.zeros(3 << 16))
    assert calls.asked[:2] == ["receive 65536 from 0", "receive 65536 from 2"]
    assert calls.asked[2:4] == ["send 65536 to 2", "send 65536 to 0"]
