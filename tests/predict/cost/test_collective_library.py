"""Collectives of GPUs: laws, and published runs of nccl-tests that the constants were fitted to.

`nccl_tests.csv` names the source of every time. Sizes are whole buffers, as nccl-tests counts them.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.catalogue import find_device
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_file import parse_cluster
from weft.predict.cost.collective_library import HALF_WIDTH
from weft.predict.cost.network import Network

with (Path(__file__).parent / "nccl_tests.csv").open(encoding="utf-8") as file:
    RUNS = list(csv.DictReader(file))
DEVICES = {"a100": "a100-80gb", "h100": "h100-80gb", "h200": "h200-141gb", "b200": "b200"}
SIZES = st.integers(0, 2**34)


def network(device: str, nodes: int, devices: int, inside: float, between: float) -> Network:
    entry = find_device(DEVICES[device], "")
    link = Link(inside, entry.link.latency_s)
    group = NodeGroup(name="node", count=nodes, device=entry.device, devices=devices, link=link)
    links = {("node", "node"): Link(between or 1e9, entry.network.latency_s)}
    return Network(cluster=Cluster(name="cluster", groups=(group,), links=links))


def ratio(run: dict[str, str]) -> float:
    """The predicted time over the published one."""
    nodes, devices = int(run["nodes"]), int(run["devices"])
    found = network(
        run["device"], nodes, devices, float(run["inside_bytes_per_s"]), float(run["between_bytes_per_s"])
    )
    moved_bytes = round(float(run["mebibytes"]) * 2**20)
    taken = getattr(found, run["collective"])(range(nodes * devices), moved_bytes)
    return float(taken.seconds / (float(run["microseconds"]) * 1e-6))


def test_published_times_are_within_the_interval() -> None:
    errors = np.array([abs(ratio(run) - 1.0) for run in RUNS])
    assert errors.mean() < 0.11
    assert (errors <= HALF_WIDTH).mean() >= 0.9
    assert errors.max() < 0.35


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_neither_kind_nor_scale_is_biased(collective: str) -> None:
    for several in (False, True):
        found = [
            ratio(run) for run in RUNS if run["collective"] == collective and (run["nodes"] != "1") == several
        ]
        assert abs(np.median(found) - 1.0) < 0.15


@given(sizes=st.lists(SIZES, min_size=2, max_size=2), nodes=st.integers(1, 40))
def test_more_bytes_or_nodes_take_longer(sizes: list[int], nodes: int) -> None:
    low, high = sorted(sizes)
    few, many = (network("h100", count, 8, 450e9, 400e9) for count in (nodes, nodes + 1))
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        short = getattr(few, name)(range(8 * nodes), low).seconds
        assert short <= getattr(few, name)(range(8 * nodes), high).seconds
        if name != "all_reduce":
            assert short <= getattr(many, name)(range(8 * nodes + 8), low).seconds


@given(size=SIZES)
def test_a_machine_that_is_twice_as_fast_takes_half(size: int) -> None:
    slow = network("h100", 4, 8, 450e9, 400e9)
    [group], [link] = slow.cluster.groups, slow.cluster.links.values()
    device = replace(group.device, launch_s=group.device.launch_s / 2.0)
    faster = replace(
        group, device=device, link=Link(2.0 * group.link.bytes_per_s, group.link.latency_s / 2.0)
    )
    links = {("node", "node"): Link(2.0 * link.bytes_per_s, link.latency_s / 2.0)}
    fast = Network(cluster=replace(slow.cluster, groups=(faster,), links=links))
    for ranks in (range(8), range(32)):
        assert fast.all_reduce_s(ranks, size) == pytest.approx(slow.all_reduce_s(ranks, size) / 2.0)


@given(size=st.integers(2**26, 2**34))
def test_switches_that_add_up_beat_a_ring_from_five_ranks_on(size: int) -> None:
    hopper, ampere = (network(name, 1, 8, 450e9, 0.0) for name in ("h100", "a100"))
    for ranks in range(2, 9):
        added, ring = hopper.all_reduce_s(range(ranks), size), ampere.all_reduce_s(range(ranks), size)
        assert added < ring if ranks >= 5 else added == ring


def test_a_node_without_nvlink_has_no_such_switch() -> None:
    usual, slow = network("h100", 1, 8, 450e9, 0.0), network("h100", 1, 8, 64e9, 0.0)
    assert usual.all_reduce_s(range(8), 2**30) * 450 / 64 < slow.all_reduce_s(range(8), 2**30)


def test_gathers_over_many_nodes_wait_for_every_step() -> None:
    """A ring has a step for each rank, so that small shards take longer with every node."""
    found = [
        Network(cluster=parse_cluster(f"{8 * nodes}xa100-80gb")).all_gather(range(8 * nodes), 2**24).seconds
        for nodes in (2, 16, 128)
    ]
    assert found[1] > 3 * found[0]
    assert found[2] > 5 * found[1]
