"""What a lab makes of a cluster: quotas in proportion, cores never overfull, links at their rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.clusters import device, group, mixed

from weft.describe.cluster import Cluster, Link
from weft.errors import InputError
from weft.lab.scheme import (
    CORE_LOAD,
    LEAST_QUOTA_US,
    LONGEST_PERIOD_US,
    MOST_RANKS,
    least_rates,
    pid_of,
    quota_and_period_us,
    relative_speeds,
    scheme_of,
    shared_cores,
)

SPEEDS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=MOST_RANKS)


@given(SPEEDS, st.integers(1, 8))
def test_no_core_holds_more_than_its_load_and_the_fullest_one_holds_it_or_the_fastest_device_does(
    speeds: list[float], cores: int
) -> None:
    share, core_of = shared_cores(speeds, cores)
    loads = [
        sum(share * speeds[rank] for rank, at in enumerate(core_of) if at == core) for core in range(cores)
    ]
    assert max(loads) <= CORE_LOAD * (1 + 1e-12)
    assert share <= CORE_LOAD
    assert share == CORE_LOAD or max(loads) == pytest.approx(CORE_LOAD)


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6))
def test_quotas_are_in_proportion_to_the_speeds(speeds: list[float]) -> None:
    scheme = scheme_of(mixed(speeds), range(2), 7)
    for rank, speed in zip(scheme.ranks, speeds, strict=True):
        assert rank.relative_speed == pytest.approx(speed / max(speeds))
        assert rank.quota == pytest.approx(scheme.share * rank.relative_speed)


def test_a_ranks_own_speed_counts_beside_its_devices_flops() -> None:
    fast = group("new", device("fast", 4e10), devices=2, speeds=(1.0, 0.5))
    slow = group("old", device("slow", 1e10))
    cluster = Cluster(name="c", groups=(fast, slow), links={("new", "old"): Link(1e8, 0.0)})
    assert relative_speeds(cluster) == [1.0, 0.5, 0.25]


@given(st.floats(LEAST_QUOTA_US / LONGEST_PERIOD_US, 1.0))
def test_the_kernels_numbers_are_the_quota_and_within_its_bounds(quota: float) -> None:
    quota_us, period_us = quota_and_period_us(quota)
    assert quota_us >= LEAST_QUOTA_US
    assert period_us <= LONGEST_PERIOD_US
    assert quota_us / period_us == pytest.approx(quota, rel=1e-3)


@given(st.lists(st.floats(1e4, 1e10), min_size=1, max_size=6))
def test_what_links_are_sure_of_is_what_the_interface_carries(rates: list[float]) -> None:
    least = least_rates([0.0, *rates])
    assert least[0] == 0.0
    assert sum(least) == pytest.approx(max(rates))
    assert all(one <= rate * (1 + 1e-12) for one, rate in zip(least[1:], rates, strict=True))


def test_nodes_have_names_addresses_and_the_clusters_rates() -> None:
    fast = group("new", device("fast", 4e10), nodes=1, devices=2)
    slow = group("old", device("slow", 1e10), nodes=2)
    links = {("new", "old"): Link(1e8, 0.0), ("old", "old"): Link(1e7, 0.0)}
    scheme = scheme_of(Cluster(name="c", groups=(fast, slow), links=links), [4, 6], 99)
    assert [node.name for node in scheme.nodes] == ["new-0", "old-0", "old-1"]
    assert [node.rates for node in scheme.nodes] == [(0, 1e8, 1e8), (1e8, 0, 1e7), (1e8, 1e7, 0)]
    assert len({node.address for node in scheme.nodes}) == 3
    assert [scheme.ranks_on(node) for node in range(3)] == [[0, 1], [2], [3]]
    assert {rank.core for rank in scheme.ranks} == {4, 6}
    names = [scheme.name, scheme.hub, *(node.namespace for node in scheme.nodes)]
    assert {pid_of(name) for name in names} == {99}
    assert pid_of("eth0") is pid_of("weft-lab-x") is None


def refused(cluster: Cluster) -> str:
    with pytest.raises(InputError) as caught:
        scheme_of(cluster, range(2), 1)
    return str(caught.value)


def test_what_cannot_be_emulated_is_refused() -> None:
    assert "17 devices; a lab runs one process for each (nearest valid: 16)" in refused(mixed([1.0] * 17))
    slow_link = (
        "link g0 - g1: latency 20.0 ms cannot be emulated, only bandwidths are (nearest valid: 1.00 ms)"
    )
    assert slow_link in refused(mixed(latency_s=0.02))
    assert "has 0.0001 of the fastest one's speed, too little for a quota" in refused(mixed([1.0, 1e-4]))
    one = mixed()
    halved = replace(one.groups[1], device=replace(one.groups[1].device, flops_per_s={"fp16": 1e12}))
    told = refused(replace(one, groups=(one.groups[0], halved)))
    assert "d1 has no fp32 flops to compare speeds by" in told
