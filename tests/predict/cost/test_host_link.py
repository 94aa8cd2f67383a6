"""Laws of transfers through host memory: the copies at both ends come on top of TCP between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import CPU, GPU, MACHINE, cluster

from weft.describe.cluster import Cluster
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.predict.cost.host_link import LOOPBACK, TRANSFER_SPREAD, host_copy_s
from weft.predict.cost.network import Network

DEVICE = replace(GPU, host_bytes_per_s=32e9)
CLUSTER = cluster(device=DEVICE)
DIRECT, HOST = Network(cluster=CLUSTER), Network(cluster=CLUSTER, through_host=True)
sizes = st.integers(0, 10**9)
groups = st.sets(st.integers(0, 7), min_size=2).map(sorted)


def with_loopback(network: Network) -> Network:
    """The same network with TCP inside its nodes, and no copies."""
    # Devices that are their own hosts use TCP's collectives, too.
    grouped = tuple(replace(group, link=LOOPBACK, device=CPU) for group in CLUSTER.groups)
    return replace(network, cluster=replace(CLUSTER, groups=grouped), through_host=False)


@given(st.integers(0, 7), st.integers(0, 7), sizes)
def test_a_message_is_copied_out_and_in(rank: int, peer: int, size: int) -> None:
    if rank == peer:
        return
    copied_s = host_copy_s(DEVICE, size)
    busy_s, latency_s = with_loopback(DIRECT).message_s(rank, peer, size)
    assert HOST.message_s(rank, peer, size) == pytest.approx((busy_s + copied_s, latency_s + copied_s))


@given(groups, sizes)
def test_collectives_copy_all_that_a_rank_gives_and_takes(ranks: list[int], size: int) -> None:
    direct, share = with_loopback(DIRECT), size / len(ranks)
    for name, given_bytes, taken_bytes in (
        ("all_reduce", size, size),
        ("reduce_scatter", size, share),
        ("all_gather", share, size),
        ("all_to_all", size, size),
    ):
        host, plain = (getattr(one, name)(ranks, size) for one in (HOST, direct))
        copies_s = host_copy_s(DEVICE, given_bytes) + host_copy_s(DEVICE, taken_bytes)
        assert host.seconds == pytest.approx(plain.seconds + copies_s)
        assert host.link_s == plain.link_s


@given(groups, sizes)
def test_a_cpu_is_its_own_host(ranks: list[int], size: int) -> None:
    where: Cluster = cluster(device=CPU)
    assert where.device_of(0).synchronous
    direct, host = (
        Network(cluster=where, machine=MACHINE, through_host=through_host) for through_host in (False, True)
    )
    assert host.all_reduce(ranks, size) == direct.all_reduce(ranks, size)
    assert host.message_s(ranks[0], ranks[1], size) == direct.message_s(ranks[0], ranks[1], size)


def planned(transport: str) -> PlannedJob:
    return plan_run(
        parse_run(
            {
                "model": {"preset": "gpt-10m"},
                "train": {"global_batch": 64, "precision": "bf16"},
                "cluster": {"use": "4xa100-80gb"},
                "run": {"transport": transport},
                # Larger micro-batches compute longer than hosts launch kernels.
                "plan": {"pp": 2, "dp": 2, "schedule": "1f1b", "micro_batch_size": 8},
            }
        )
    )


def test_a_run_through_host_memory_is_priced_so_and_says_it() -> None:
    device, host = planned("device"), planned("host")
    assert "transport" not in device.problem.assumed
    words = host.problem.assumed["transport"]
    assert words.startswith("messages and sums go through host memory: copies at 78% of ")
    assert words.endswith("TCP inside nodes at 2.00 GB/s and 30.0 us")
    assert host.prediction.step_s > 1.5 * device.prediction.step_s
    assert "host links of data sheets" in host.prediction.source
    assert host.prediction.step_high_s / host.prediction.step_s >= 1.0 + TRANSFER_SPREAD
    # NCCL opens no communicators.
    assert device.prediction.communicator_bytes
    assert not host.prediction.communicator_bytes


def test_a_run_on_cpus_is_priced_alike_with_both_transports() -> None:
    problem = planned("host").problem
    assert problem.cost_model.through_host
    of_cpus = replace(problem, job=replace(problem.job, cluster=cluster(device=CPU)))
    assert not of_cpus.cost_model.through_host


def test_a_device_of_unknown_host_link_is_refused() -> None:
    network = Network(cluster=cluster(device=GPU), through_host=True)
    with pytest.raises(InputError, match=r"device\.gpu\.host_bandwidth"):
        network.message_s(0, 1, 1)
