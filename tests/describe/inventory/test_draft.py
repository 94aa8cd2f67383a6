"""Drafts of CLUSTER.toml: what is known stands as keys, what is assumed as comments."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Link
from weft.describe.cluster_file import load_cluster
from weft.describe.inventory.draft import ClusterDraft, NodeLinks, draft_cluster
from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.ports import INFINIBAND, Port
from weft.describe.inventory.topology import Topology
from weft.errors import InputError

SWITCHED = Topology((("X", "NV18"), ("NV18", "X")))
PORT = Port(name="mlx5_0", bytes_per_s=25e9, layer=INFINIBAND)


def nodes(device: str, count: int = 1, devices: int = 2, **more: object) -> list[ListedNode]:
    return [
        ListedNode(name=f"{device}-{index}", device=device, devices=devices, **more)  # type: ignore[arg-type]
        for index in range(count)
    ]


def drafted(
    listed: list[ListedNode], links: NodeLinks | None = None, device: str | None = None
) -> ClusterDraft:
    return draft_cluster(listed, name="mine", sources=["a list"], links=links or NodeLinks(), device=device)


@given(
    st.dictionaries(
        st.sampled_from(list(catalogue())), st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1
    )
)
def test_the_file_is_the_listed_nodes_in_their_usual_links(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[str, tuple[int, int]]
) -> None:
    listed = [node for device, (count, size) in counts.items() for node in nodes(device, count, size)]
    draft = drafted(listed)
    path = tmp_path_factory.mktemp("draft") / "mine.toml"
    path.write_text(draft.to_toml())
    cluster = load_cluster(path)
    found = {group.device.name: (group.count, group.devices) for group in cluster.groups}
    assert found == counts
    assert cluster.name == "mine"
    assert not draft.missing
    # Nobody said anything of links, so all of them are assumed.
    assert cluster.assumed_inside == {group.name for group in cluster.groups}
    assert cluster.assumed_between == set(cluster.links)


def test_known_links_are_stated_and_assumed_ones_are_not(tmp_path: Path) -> None:
    links = NodeLinks(topology=SWITCHED, ports=(PORT, PORT), of=("h100-80gb", 2))
    draft = drafted([*nodes("h100", 2), *nodes("t4")], links, device="h100-80gb")
    (tmp_path / "c.toml").write_text(draft.to_toml())
    cluster = load_cluster(tmp_path / "c.toml")
    assert cluster.groups[0].link == Link(450e9, catalogue()["h100-80gb"].link.latency_s)
    assert cluster.assumed_inside == {"t4"}
    assert cluster.links["h100-80gb", "h100-80gb"] == Link(50e9, 10e-6)
    assert cluster.assumed_between == {("h100-80gb", "t4")}
    assert draft.assumed == ["t4: links inside nodes as usual; `nvidia-smi topo -m` tells (--topology)"]


def test_a_topology_of_other_devices_does_not_count() -> None:
    draft = drafted(nodes("h100-80gb", 1, 4), NodeLinks(topology=SWITCHED))
    assert draft.groups[0].inside is None


def test_an_ambiguous_device_is_the_first_with_the_others_beside_it() -> None:
    draft = drafted(nodes("a100"))
    assert 'device = "a100-40gb"  # the list says a100: or a100-80gb or' in draft.to_toml()
    assert draft.assumed[0].startswith(
        "a100-40gb: the devices are a100-40gb; the list says a100: or a100-80gb or "
    )
    assert drafted(nodes("a100"), device="a100-80gb").groups[0].device == "a100-80gb"
    # The list says t4, whatever the option says.
    assert drafted(nodes("t4"), device="a100-80gb").groups[0].device == "t4"


def test_an_unknown_device_is_to_be_filled_in(tmp_path: Path) -> None:
    draft = drafted(nodes("Marvel 9000", 2, memory_bytes=24 * 2**30))
    (line,) = draft.missing
    assert line.startswith("Marvel 9000: the catalogue has no Marvel 9000; fill in its data sheet")
    path = tmp_path / "c.toml"
    path.write_text(draft.to_toml())
    with pytest.raises(InputError) as refused:
        load_cluster(path)
    assert {violation.where.rpartition(".")[2] for violation in refused.value.violations} == {
        "bandwidth", "latency", "memory_bandwidth", "bf16", "fp32"
    }  # fmt: skip
    filled = (
        draft.to_toml()
        .replace('memory_bandwidth = ""', 'memory_bandwidth = "1 TB/s"')
        .replace('bf16 = "", fp32 = ""', 'bf16 = "80 TFLOP/s", fp32 = "40 TFLOP/s"')
        .replace('bandwidth = ""', 'bandwidth = "25 GB/s"')
        .replace('latency = ""', 'latency = "9 us"')
    )
    path.write_text(filled)
    assert load_cluster(path).groups[0].device.memory_bytes == 24 * 2**30


def test_memory_of_the_driver_replaces_that_of_the_data_sheet(tmp_path: Path) -> None:
    draft = drafted([*nodes("l4", memory_bytes=23034 * 2**20), *nodes("l4", memory_bytes=22000 * 2**20)])
    (tmp_path / "c.toml").write_text(draft.to_toml())
    cluster = load_cluster(tmp_path / "c.toml")
    assert cluster.device_of(0).memory_bytes == 22000 * 2**20


def test_nodes_that_no_job_gets_are_left_out_by_reason() -> None:
    down = [ListedNode(name=f"g{index}", device="t4", devices=1, unusable="DOWN") for index in range(6)]
    draft = drafted([*nodes("t4"), *down, ListedNode(name="login", device="", devices=0)])
    assert draft.left_out == ("g0, g1, g2, g3 and 2 more (DOWN)", "login (no devices)")
    assert "# Left out: login (no devices)" in draft.to_toml()
    assert (draft.nodes, draft.devices) == (1, 2)
