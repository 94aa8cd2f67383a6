"""Nodes and devices that are left out: by group, kind or rank, all or some, never the last one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_file import parse_cluster
from weft.describe.left_out import remaining, without
from weft.describe.plan_subject import cluster_of_run
from weft.describe.run_file import load_run, naming, parse_run
from weft.errors import InputError

MIXED = parse_cluster("8xt4+16xa100-80gb+8xv100-16gb")


def counts(cluster: Cluster) -> dict[str, int]:
    return {group.name: group.count for group in cluster.groups}


def test_all_or_some_nodes_of_a_group_leave_with_their_links() -> None:
    left = without(MIXED, ["t4", "1 a100-80gb"])
    assert counts(left) == {"a100-80gb": 1, "v100-16gb": 1}
    assert left.name == "8xt4+16xa100-80gb+8xv100-16gb without t4 and 1 a100-80gb"
    assert left.ranks == 16
    assert all("t4" not in pair for pair in left.links)
    assert left.assumed_inside == {"a100-80gb", "v100-16gb"}
    assert all("t4" not in pair for pair in left.assumed_between)
    assert without(MIXED, []) is MIXED


@given(st.lists(st.tuples(st.sampled_from(["t4", "a100-80gb", "v100-16gb"]), st.integers(1, 2)), max_size=4))
def test_what_is_left_is_what_was_not_named(words: list[tuple[str, int]]) -> None:
    taken = dict.fromkeys(counts(MIXED), 0)
    for name, count in words:
        taken[name] += count
    expected = {name: count - taken[name] for name, count in counts(MIXED).items()}
    legal = all(count >= 0 for count in expected.values()) and any(expected.values())
    names = [f"{count} {name}" for name, count in words]
    if legal:
        assert counts(without(MIXED, names)) == {name: count for name, count in expected.items() if count}
    else:
        with pytest.raises(InputError, match=r"cluster\.without"):
            without(MIXED, names)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw one to three groups of up to three nodes of up to three devices, of unlike speeds or not."""
    groups = []
    for name in draw(st.sampled_from([("a",), ("a", "b"), ("b", "b-2", "b-15")])):
        devices = draw(st.integers(1, 3))
        speeds = draw(st.sampled_from([(), (1.0, 0.5, 2.0)[:devices]]))
        groups.append(
            NodeGroup(
                name=name,
                count=draw(st.integers(1, 3)),
                device=replace(MIXED.groups[0].device, name=f"device-{name}"),
                devices=devices,
                link=Link(draw(st.sampled_from([1e9, 2e9])), 1e-6),
                speeds=speeds,
            )
        )
    names = sorted(group.name for group in groups)
    pairs = [(one, other) for one in names for other in names if one <= other]
    links = {pair: Link(1e8 * number, 1e-5) for number, pair in enumerate(pairs, 1)}
    assumed = frozenset(draw(st.sets(st.sampled_from(pairs))))
    return Cluster(
        name="drawn",
        groups=tuple(groups),
        links=links,
        assumed_inside=frozenset(draw(st.sets(st.sampled_from(names)))),
        assumed_between=assumed,
    )


@given(st.data())
def test_devices_keep_their_order_their_speeds_and_their_links(data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    gone = data.draw(st.sets(st.integers(0, cluster.ranks - 1), max_size=cluster.ranks - 1))
    space = data.draw(st.sampled_from(["", " "]))
    left, ranks = remaining(cluster, [f"device{space}{rank}" for rank in sorted(gone)])
    assert ranks == tuple(rank for rank in range(cluster.ranks) if rank not in gone)
    assert left.ranks == len(ranks)
    names = [group.name for group in left.groups]
    assert len({*names}) == len(names)
    for rank, former in enumerate(ranks):
        assert left.device_of(rank) == cluster.device_of(former)
        assert left.speed_of(rank) == cluster.speed_of(former)
        inside = left.group_of(rank).name in left.assumed_inside
        assert inside == (cluster.group_of(former).name in cluster.assumed_inside)
    for pair in combinations(range(left.ranks), 2):
        former_pair = [ranks[rank] for rank in pair]
        same_node = cluster.node_of(former_pair[0]) == cluster.node_of(former_pair[1])
        assert (left.node_of(pair[0]) == left.node_of(pair[1])) == same_node
        assert left.link_between(*pair) == cluster.link_between(*former_pair)
        if not same_node:
            between, former_between = (
                tuple(sorted(one.group_of(rank).name for rank in two))
                for one, two in ((left, pair), (cluster, former_pair))
            )
            assert (between in left.assumed_between) == (former_between in cluster.assumed_between)


def test_a_node_without_a_device_stands_between_the_nodes_before_and_after_it() -> None:
    cluster = replace(MIXED, groups=(replace(MIXED.groups[0], count=4, speeds=(1.0, 2.0, 3.0, 4.0)),))
    (kept, lacks, behind) = without(cluster, ["device 9"]).groups
    assert [(one.name, one.count, one.devices) for one in (kept, lacks, behind)] == [
        ("t4", 2, 4),
        ("t4-2", 1, 3),
        ("t4-3", 1, 4),
    ]
    assert lacks.speeds == (1.0, 3.0, 4.0)
    assert without(cluster, ["device 9"]).name == f"{cluster.name} without device 9"
    # Words for nodes and for devices go together, and both count what the cluster had at first.
    assert [one.count for one in without(cluster, ["device 9", "1 t4"]).groups] == [2, 1]
    assert remaining(cluster, ["1 t4", "device 3"]).ranks == (0, 1, 2, *range(4, 12))


def test_a_group_called_like_a_device_comes_first() -> None:
    named = replace(MIXED, groups=(replace(MIXED.groups[0], name="device 2"), MIXED.groups[1]))
    assert counts(without(named, ["device 2"])) == {"a100-80gb": 2}
    assert without(named, ["device2"]).ranks == named.ranks - 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["device 32"], r"'device 32': 8xt4\S* has devices 0 to 31 \(nearest valid: device 31\)"),
        (["device 2", "device2"], "'device2' is left out already"),
        (["t4", "device 2"], "'device 2' is left out already"),
        ([f"device {rank}" for rank in range(32)], "'device 31' leaves no node of 8xt4"),
        (["device"], "'device' names no nodes"),
        (["t5"], r"'t5' names no nodes of the cluster: t4, a100-80gb, v100-16gb \(nearest valid: t4\)"),
        (["9 t4"], r"'9 t4': t4 has 2 nodes \(nearest valid: 2 t4\)"),
        (["0 t4"], r"'0 t4': t4 has 2 nodes"),
        (["t4", "a100-80gb", "v100-16gb"], "'v100-16gb' leaves no node of "),
        ([""], "'' names no nodes"),
    ],
)
def test_other_words_are_refused(words: list[str], line: str) -> None:
    with pytest.raises(InputError, match=line):
        without(MIXED, words)


def test_a_run_file_leaves_nodes_out_and_another_cluster_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt-1m"\n[cluster]\nuse = "8xt4+8xl4"\nwithout = ["t4"]\n')
    run = load_run(path)
    assert counts(cluster_of_run(run)) == {"l4": 1}
    path.write_text(run.to_toml())
    assert load_run(path).cluster == run.cluster
    assert counts(cluster_of_run(naming(run, on="4xt4"))) == {"t4": 1}
    plain = parse_run({"model": {"preset": "gpt-1m"}})
    assert "without" not in plain.to_toml()
