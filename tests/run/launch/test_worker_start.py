"""Ranks find their devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.run.launch.worker_start import device_index


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
