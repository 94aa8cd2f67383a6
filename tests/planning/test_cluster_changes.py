"""Changes of clusters in words: what they change, what they leave, and how nonsense is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_file import cluster_of, parse_cluster
from weft.errors import InputError
from weft.planning.cluster_changes import changed_cluster

FAST_AND_SLOW = {
    "node": [
        {"name": "fast", "count": 2, "device": "a100-80gb"},
        {"name": "slow", "count": 1, "device": "t4", "devices": 4},
    ]
}


def fast_and_slow() -> Cluster:
    return cluster_of(FAST_AND_SLOW, "cluster.toml")


def message(cluster: Cluster, text: str) -> str:
    with pytest.raises(InputError) as caught:
        changed_cluster(cluster, text)
    (violation,) = caught.value.violations
    return str(violation)


@pytest.mark.parametrize(
    "text", ["inter 10 Gbit/s", "intra 5 GB/s", "memory 30 GB", "device h100-80gb", "+1 node fast"]
)
def test_a_change_keeps_the_devices_before_it_in_their_places(text: str) -> None:
    before, after = fast_and_slow(), changed_cluster(fast_and_slow(), text)
    assert after.fingerprint != before.fingerprint
    assert after.name == f"cluster, {text}"
    assert after.ranks == before.ranks + (8 if text.startswith("+") else 0)


def test_links_and_memory_change_alone() -> None:
    before = fast_and_slow()
    inter = changed_cluster(before, "inter 10 Gbit/s")
    assert {link.bytes_per_s for link in inter.links.values()} == {1.25e9}
    assert {pair: link.latency_s for pair, link in inter.links.items()} == {
        pair: link.latency_s for pair, link in before.links.items()
    }
    assert inter.groups == before.groups
    intra = changed_cluster(before, "intra 5 GB/s")
    assert {group.link.bytes_per_s for group in intra.groups} == {5e9}
    assert intra.links == before.links
    memory = changed_cluster(before, "memory 30 GB")
    assert {group.device.memory_bytes for group in memory.groups} == {30 * 10**9}
    device = changed_cluster(before, "device h100-80gb")
    assert {group.device.name for group in device.groups} == {"h100-80gb"}
    assert [group.link for group in device.groups] == [group.link for group in before.groups]


@given(count=st.integers(1, 40))
def test_nodes_that_are_added_and_taken_away_again_leave_the_cluster(count: int) -> None:
    before = fast_and_slow()
    more = changed_cluster(before, f"+{count} nodes fast")
    assert more.ranks == before.ranks + 8 * count
    assert changed_cluster(more, f"-{count} nodes fast").fingerprint == before.fingerprint


def test_nodes_of_another_device_come_with_their_usual_links() -> None:
    one_node = parse_cluster("8xa100-80gb")
    two = changed_cluster(one_node, "+1 node a100-80gb")
    assert two.fingerprint == parse_cluster("16xa100-80gb").fingerprint
    mixed = changed_cluster(one_node, "+ 2 nodes v100-32gb")
    assert mixed.fingerprint == parse_cluster("8xa100-80gb+16xv100-32gb").fingerprint
    assert (
        changed_cluster(mixed, "-1 node a100-80gb").fingerprint == parse_cluster("16xv100-32gb").fingerprint
    )


def test_a_device_that_no_catalogue_knows_takes_the_slowest_known_network() -> None:
    strange = replace(fast_and_slow().groups[1], device=replace(fast_and_slow().groups[1].device, name="own"))
    link = Link(1e9, 1e-5)
    cluster = Cluster(name="c", groups=(fast_and_slow().groups[0], strange), links={("fast", "slow"): link})
    assert changed_cluster(cluster, "+1 node slow").links["slow", "slow"] == link
    alone = Cluster(name="alone", groups=(strange,))
    assert message(alone, "+1 node own") == (
        "--what-if: '+1 node own' needs a network between nodes, which alone does not describe"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "iner 25 Gbit/s",
            "'iner 25 Gbit/s' is no change that is known, such as 'inter 25 Gbit/s', 'intra 100 GB/s', "
            "'memory 40 GB', 'device h100-80gb', '+1 node a100-80gb' (nearest valid: inter 25 Gbit/s)",
        ),
        ("one node more", "(nearest valid: +1 node a100-80gb)"),
        ("inter", "(nearest valid: inter 25 Gbit/s)"),
        ("inter 25 gbit/s", "--what-if inter: '25 gbit/s': 'gbit/s' is not a unit"),
        ("memory 0.5 GB", "leaves no memory beside a device's context (nearest valid: memory 16 GB)"),
        ("device a1000-80gb", "--what-if device: 'a1000-80gb' is not in the catalogue"),
        ("+0 node fast", "'+0 node fast' adds nothing (nearest valid: +1 node fast)"),
        (
            "+2 nodes fsat",
            "names neither nodes of the cluster (fast, slow) nor a device of the catalogue "
            "(nearest valid: +2 node fast)",
        ),
        ("+999999 nodes fast", "makes more than 1000000 devices"),
        ("-1 node fats", "names no nodes of the cluster: fast, slow (nearest valid: -1 node fast)"),
        ("-3 node fast", "fast has 2 nodes (nearest valid: -2 node fast)"),
        ("-0 node slow", "slow has 1 node (nearest valid: -1 node slow)"),
    ],
)
def test_nonsense_is_one_line_with_the_nearest(text: str, expected: str) -> None:
    assert expected in message(fast_and_slow(), text)


def test_what_a_small_cluster_has_not_cannot_change(tmp_path: Path) -> None:
    one_node, one_device = parse_cluster("8xa100-80gb"), parse_cluster("1xa100-80gb")
    assert "changes nothing: 8xa100-80gb is one node (nearest valid: intra 1 GB/s)" in message(
        one_node, "inter 1 GB/s"
    )
    assert "every node has one device (nearest valid: inter 1 GB/s)" in message(one_device, "intra 1 GB/s")
    assert "a100-80gb has 1 node, and a cluster needs one" in message(one_node, "-1 node a100-80gb")
