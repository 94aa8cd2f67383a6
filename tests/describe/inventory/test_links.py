"""Connections inside a node and ports to the outside, from the texts of their tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Link
from weft.describe.inventory.ports import Port, network_of, ports_of, read_ports
from weft.describe.inventory.topology import Topology, bandwidth_inside, read_topology
from weft.errors import InputError


def matrix(*ways: str) -> str:
    """Return what `nvidia-smi topo -m` prints, from one word per row."""
    rows = [row.split() for row in ways]
    names = [f"GPU{index}" for index in range(len(rows))]
    head = "\t".join(["", f"\x1b[4m{names[0]}", *names[1:], "NIC0", "CPU Affinity", "NUMA Affinity\x1b[0m"])
    lines = [
        "\t".join([name, *(f" {way} " if way == "X" else way for way in row), "PXB", "0-31", "0"])
        for name, row in zip(names, rows, strict=True)
    ]
    nic = "\t".join(["NIC0", *["PXB"] * len(rows), " X "])
    return "\n".join([head, *lines, nic, "", "Legend:", "", "  X    = Self", "  NIC0: mlx5_0"])


def rate(device: str, *ways: str) -> float:
    topology = read_topology(matrix(*ways), "x")
    assert topology == Topology(tuple(tuple(row.split()) for row in ways))
    return bandwidth_inside(topology, catalogue()[device])[0] / 1e9


def test_every_pair_of_a_switch_has_all_links_of_a_device() -> None:
    assert rate("h100-80gb", *switched(8, "NV18")) == 450
    assert rate("a100-80gb", *switched(8, "NV12")) == 300


def switched(devices: int, way: str) -> list[str]:
    return [" ".join("X" if i == j else way for j in range(devices)) for i in range(devices)]


def test_links_without_a_switch_add_up() -> None:
    assert rate("a100-80gb", *switched(4, "NV4")) == 300
    # A quarter of DGX-1: two devices have four of their links here, the others three.
    assert rate("v100-16gb", "X NV1 NV1 NV2", "NV1 X NV2 NODE", "NV1 NV2 X NV1", "NV2 NODE NV1 X") == 75


def test_bridged_pairs_meet_over_pci_express() -> None:
    pairs = ("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
    assert rate("rtx-a6000", *pairs) == 32
    assert rate("rtx-a6000", "X NV4", "NV4 X") == 56.25
    assert rate("t4", "X PHB", "PHB X") == 16


def test_the_source_names_the_farthest_connection() -> None:
    topology = read_topology(matrix("X PIX SYS", "PIX X SYS", "SYS SYS X"), "x")
    words = bandwidth_inside(topology, catalogue()["l4"])[1]
    assert words == "PCI Express; between devices: PIX SYS, SYS crosses the connection of the NUMA nodes"


def test_the_first_matrix_of_a_text_counts_and_old_drivers_have_their_words() -> None:
    text = "before\n" + matrix("X PHB SOC", "PHB X SOC", "SOC SOC X") + "\n\n" + matrix("X NV4", "NV4 X")
    topology = read_topology(text, "x")
    assert topology.kinds == {"PHB", "SOC"}
    assert bandwidth_inside(topology, catalogue()["t4"])[1].endswith(
        "SOC crosses the connection of the sockets"
    )


def test_one_device_has_no_connections() -> None:
    assert read_topology(matrix("X"), "x") == Topology((("X",),))
    assert rate("h100-80gb", "X") == 64


@pytest.mark.parametrize("text", ["", "GPU0\tGPU1\n", "\tGPU0\tGPU1\nGPU0\t X \tSYS\n", "no devices"])
def test_a_text_without_a_whole_matrix_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="x: no matrix of connections"):
        read_topology(text, "x")


IBSTAT = """\
 CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tBase lid: 12
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tNumber of ports: 2
\tPort 1:
\t\tState: Active
\t\tRate: 400
\t\tLink layer: InfiniBand
\tPort 2:
\t\tState: Down
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_bond_0'
\tPort 1:
\t\tState: Active
\t\tRate: 800
\t\tLink layer: Ethernet
"""
IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:0002:c903:0007:eafb
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 100 Gb/sec (4X EDR)
\tlink_layer:\t InfiniBand

Infiniband device 'mlx5_1' port 1 status:
\tstate:\t\t 1: DOWN
\trate:\t\t 40 Gb/sec (4X QDR)
\tlink_layer:\t InfiniBand
"""


def test_adapters_of_the_fastest_kind_add_up() -> None:
    ports = read_ports(IBSTAT, "x")
    assert [(port.name, port.bytes_per_s * 8 / 1e9, port.layer) for port in ports] == [
        ("mlx5_0", 400, "InfiniBand"),
        ("mlx5_1", 400, "InfiniBand"),
        ("mlx5_bond_0", 800, "Ethernet"),
    ]
    # InfiniBand is for jobs; Ethernet beside it is not.
    assert network_of(ports) == (Link(100e9, 10e-6), "2 x 400 Gbit/s InfiniBand: mlx5_0, mlx5_1")
    assert network_of(read_ports(IBSTATUS, "x")) == (Link(12.5e9, 10e-6), "1 x 100 Gbit/s InfiniBand: mlx5_0")


def test_slower_adapters_and_more_interfaces_do_not_count() -> None:
    adapters = [
        Port(name=f"mlx5_{index}", bytes_per_s=rate, layer="Ethernet")
        for index, rate in enumerate([25e9, 3e9])
    ]
    plain = [
        Port(name=name, bytes_per_s=50e9, layer="Ethernet", remote_memory=False) for name in ("eth0", "eth1")
    ]
    assert network_of([*plain, *adapters]) == (Link(25e9, 10e-6), "1 x 200 Gbit/s Ethernet: mlx5_0")
    assert network_of(plain) == (Link(50e9, 30e-6), "1 x 400 Gbit/s Ethernet: eth0")
    assert network_of([]) is None


def test_a_text_without_ports_is_refused() -> None:
    for text in ("", "CA 'mlx5_0'\n\tCA type: MT4129\n", "eth0: up"):
        with pytest.raises(InputError, match="x: no ports; weft reads ibstat and ibstatus"):
            read_ports(text, "x")


def test_the_kernels_folders_list_real_ports_that_are_up(tmp_path: Path) -> None:
    def made(folder: str, **values: str) -> None:
        path = tmp_path / folder
        path.mkdir(parents=True)
        for name, value in values.items():
            (path / name).write_text(value + "\n")

    made("infiniband/mlx5_0/ports/1", state="4: ACTIVE", rate="200 Gb/sec (4X HDR)", link_layer="InfiniBand")
    made("infiniband/mlx5_1/ports/1", state="1: DOWN", rate="200 Gb/sec (4X HDR)", link_layer="InfiniBand")
    made("net/eth0", operstate="up", speed="25000", device="")
    made("net/eth1", operstate="down", speed="-1", device="")
    made("net/virtual", operstate="up", speed="-1", device="")
    made("net/docker0", operstate="up", speed="10000")
    made("net/eth2", operstate="up", speed="100000", device="", master="")
    made("net/bond0", operstate="up", speed="200000", bonding="")
    found = [(port.name, port.bytes_per_s * 8 / 1e9) for port in ports_of(tmp_path)]
    assert found == [("mlx5_0", 200), ("bond0", 200), ("eth0", 25)]
    assert ports_of(tmp_path / "nothing") == ()
