"""Laws: a process that ends without a farewell is named on every other rank; one that leaves is not."""

from __future__ import annotations

import socket
import threading
from unittest.mock import patch
from weakref import WeakMethod

import pytest
import torch.distributed as dist
from pool import WorkerPool

from weft.run.transport.failure_detector import FailureDetector

pytestmark = pytest.mark.processes
LIMIT_S = 30.0


class Told:
    """What a detector tells."""

    def __init__(self) -> None:
        self.rank = -1
        self.known = threading.Event()

    def take(self, rank: int) -> None:
        self.rank = rank
        self.known.set()


def gone_told(rank: int, ranks: int, gone: int) -> int:
    """One rank hangs up; the others close when they know it."""
    assert dist.group.WORLD is not None
    told = Told()
    detector = FailureDetector(WeakMethod(told.take), dist.group.WORLD, LIMIT_S)
    if rank == gone:
        detector.close(farewell=False)
    else:
        told.known.wait(LIMIT_S)
        detector.close()
    return told.rank


@pytest.mark.parametrize("gone", [0, 2])
def test_every_rank_is_told_of_the_first_one_that_is_gone(worker_pool: WorkerPool, gone: int) -> None:
    told = worker_pool.run(gone_told, gone, ranks=3)
    assert told == [-1 if rank == gone else gone for rank in range(3)]


def told_while_stopped(rank: int, ranks: int, stopped: int) -> int:
    """The last rank is gone while another one is stopped, which goes on when all others have ended."""
    assert dist.group.WORLD is not None
    told, goes_on, watch = Told(), threading.Event(), FailureDetector._watch

    def watch_later(detector: FailureDetector) -> None:
        goes_on.wait(LIMIT_S)
        watch(detector)

    with patch.object(FailureDetector, "_watch", watch_later if rank == stopped else watch):
        detector = FailureDetector(WeakMethod(told.take), dist.group.WORLD, LIMIT_S)
    if rank not in (stopped, ranks - 1):
        told.known.wait(LIMIT_S)
    if rank != stopped:
        detector.close(farewell=False)
    dist.barrier()
    if rank == stopped:
        goes_on.set()
        told.known.wait(LIMIT_S)
        detector.close()
    return told.rank


@pytest.mark.parametrize("stopped", [0, 1])
def test_every_rank_is_told_while_one_of_those_that_tell_is_stopped(
    worker_pool: WorkerPool, stopped: int
) -> None:
    assert worker_pool.run(told_while_stopped, stopped, ranks=4) == [3, 3, 3, -1]


def leave_in_order(rank: int, ranks: int, order: list[int]) -> tuple[int, bool]:
    """Ranks leave one after the other, with a farewell; whether the detector's thread has ended."""
    assert dist.group.WORLD is not None
    told = Told()
    detector = FailureDetector(WeakMethod(told.take), dist.group.WORLD, LIMIT_S)
    for leaving in order:
        if leaving == rank:
            detector.close()
        dist.barrier()
    return told.rank, detector._thread.is_alive()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]], ids=str)
def test_nobody_is_told_of_ranks_that_leave(worker_pool: WorkerPool, order: list[int]) -> None:
    assert worker_pool.run(leave_in_order, order, ranks=3) == [(-1, False)] * 3


def lines_of_a_lost_machine(rank: int, ranks: int) -> list[int]:
    assert dist.group.WORLD is not None
    told = Told()
    detector = FailureDetector(WeakMethod(told.take), dist.group.WORLD, LIMIT_S)
    line = next(iter(detector._lines.values()))
    options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
    found = [line.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    detector.close()
    return found


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system cannot set it")
def test_a_connection_to_a_machine_that_vanished_fails_within_a_minute(worker_pool: WorkerPool) -> None:
    for idle_s, interval_s, probes in worker_pool.run(lines_of_a_lost_machine, ranks=2):
        assert idle_s + interval_s * probes == 50
