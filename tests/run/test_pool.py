"""The pool itself: results, errors and hangs of its ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError, WorkerPool

pytestmark = pytest.mark.processes


def summed(rank: int, ranks: int, offset: int) -> tuple[int, int]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return os.getpid(), int(value)


def failing(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 gives up")
    dist.barrier()


def hanging(rank: int, ranks: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_cases_share_the_processes(worker_pool: WorkerPool) -> None:
    first = worker_pool.run(summed, 1, ranks=2)
    second = worker_pool.run(summed, 2, ranks=2)
    assert [value for _, value in first] == [3, 3]
    assert [value for _, value in second] == [5, 5]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_a_failing_rank_raises_with_its_traceback(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="rank 1 gives up"):
        worker_pool.run(failing, ranks=2)
    assert [value for _, value in worker_pool.run(summed, 0, ranks=2)] == [1, 1]


def test_a_hung_rank_is_replaced(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not answer"):
        worker_pool.run(hanging, ranks=2, timeout_s=1)
    assert [value for _, value in worker_pool.run(summed, 0, ranks=2)] == [1, 1]
