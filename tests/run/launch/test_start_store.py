"""Starts of one job's ranks that share a store: each meets under a name of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import pytest
import torch.distributed as dist

from weft.run.launch.worker_start import store_of_start

RANKS = 3


def meet(store: dist.Store, ranks: int = RANKS, *, timeout_s: float = 20.0) -> list[str]:
    """What the ranks of a start read under one key that its rank 0 writes; the last one comes first."""
    with ThreadPoolExecutor(ranks) as pool:

        def come(rank: int) -> str:
            own = store_of_start(store, rank, ranks, timedelta(seconds=timeout_s))
            if rank == 0:
                own.set("who", f"start {own.add('starts', 1)} of {uuid4().hex}")
            return own.get("who").decode()

        return list(pool.map(come, reversed(range(ranks))))


def test_each_start_has_keys_of_its_own() -> None:
    store = dist.HashStore()
    first = meet(store)
    # One rank of the next start is killed between its two calls, and comes again.
    store.add("weft asking", 1)
    second, third = meet(store), meet(store, 5)
    found = [first, second, third]
    assert [len(set(one)) for one in found] == [1, 1, 1]
    assert len({one[0] for one in found}) == 3
    # The count of a start begins anew.
    assert all(one[0].startswith("start 1 of ") for one in found)


def test_a_start_without_all_its_ranks_ends() -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError, match="not all of 3 ranks came"):
        store_of_start(store, 0, 3, timedelta(seconds=0.2))
