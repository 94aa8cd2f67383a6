"""Ranks find their devices, and each other."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pool import WorkerPool

from weft.errors import InputError
from weft.run.launch import worker_start
from weft.run.launch.worker_start import ON_DEMAND, device_index


@given(ranks=st.integers(1, 16), devices=st.integers(1, 16))
def test_ranks_share_devices_evenly_through_host_memory(ranks: int, devices: int) -> None:
    found = [device_index(rank, ranks, devices, "host") for rank in range(ranks)]
    counts = [found.count(device) for device in range(devices)]
    assert max(counts) - min(counts) <= 1
    if ranks <= devices:
        assert found == list(range(ranks))
        assert found == [device_index(rank, ranks, devices, None) for rank in range(ranks)]


@pytest.mark.parametrize("transport", [None, "device"])
def test_more_ranks_than_devices_are_refused_in_one_line(transport: str | None) -> None:
    with pytest.raises(
        InputError, match="2 local ranks need a CUDA device each, this machine has 1"
    ) as refused:
        device_index(1, 2, 1, transport)
    assert len(refused.value.violations) == 1
    assert 'transport = "host"' in str(refused.value)


def opened(rank: int, ranks: int, on_demand: str) -> tuple[float, int]:
    """The sum of ones over a group, and the files that the group had opened before."""
    os.environ[ON_DEMAND] = on_demand
    try:
        before = len(os.listdir("/proc/self/fd"))
        group, ones = dist.new_group(), torch.ones(1)
        files = len(os.listdir("/proc/self/fd")) - before
        dist.barrier()  # A faster rank would else connect to this one before it has counted.
        dist.all_reduce(ones, group=group)
    finally:
        del os.environ[ON_DEMAND]
    return ones.item(), files


@pytest.mark.processes
def test_groups_that_connect_on_demand_open_no_connections_before(worker_pool: WorkerPool) -> None:
    at_once, on_demand = (worker_pool.run(opened, word, ranks=6) for word in ("0", "1"))
    assert [total for total, _ in (*at_once, *on_demand)] == [6.0] * 12
    assert all(files + 5 <= others for (_, files), (_, others) in zip(on_demand, at_once, strict=True))


@pytest.mark.parametrize(("stated", "most", "left"), [(None, 0, "1"), ("0", 0, "0"), (None, 1, None)])
def test_many_ranks_connect_on_demand_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, stated: str | None, most: int, left: str | None
) -> None:
    monkeypatch.setattr(worker_start, "MOST_AT_ONCE", most)
    with patch.dict(os.environ):
        os.environ.pop(ON_DEMAND, None)
        if stated is not None:
            os.environ[ON_DEMAND] = stated
        worker_start.start_worker().close()
        assert os.environ.get(ON_DEMAND) == left
