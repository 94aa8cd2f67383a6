"""Clusters from expressions and files: round trips, catalogue defaults, everything wrong at once."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Link
from weft.describe.cluster_file import cluster_of, load_cluster, parse_cluster
from weft.describe.cluster_tables import to_toml
from weft.errors import InputError

EXAMPLE = """
name = "two-kinds"
[[node]]
name = "fast"
count = 2
device = "a100-80gb"
devices = 8
bandwidth = "300 GB/s"
latency = "3 us"
[[node]]
name = "old"
count = 4
device = "v100-16gb"
devices = 4
bandwidth = "25 GB/s"
latency = "5 us"
[[link]]
between = ["fast", "old"]
bandwidth = "25 Gbit/s"
latency = "30 us"
[device.v100-16gb]
price_per_hour = 0.9
"""


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(catalogue())), st.integers(1, 40), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_every_pair_of_ranks_of_an_expression_has_a_link(terms):
    counts = [
        (name, 1 + count % catalogue()[name].devices if partial else count * catalogue()[name].devices)
        for name, count, partial in terms
    ]
    cluster = parse_cluster("+".join(f"{count}x{name}" for name, count in counts))
    assert cluster.ranks == sum(count for _, count in counts)
    assert [group.device.name for group in cluster.groups] == [name for name, _ in counts]
    assert len({group.name for group in cluster.groups}) == len(counts)
    for rank in range(1, cluster.ranks):
        assert cluster.link_between(0, rank).bytes_per_s > 0
    assert cluster_of(tomllib.loads(to_toml(cluster)), "file") == cluster


@pytest.mark.parametrize(("rank", "near"), [(-1, 0), (8, 7), (40, 7)])
def test_a_rank_that_a_cluster_lacks_has_neither_node_nor_link(rank: int, near: int):
    cluster = parse_cluster("8xa100-80gb")
    for ask in (cluster.node_of, cluster.device_of, lambda one: cluster.link_between(0, one)):
        with pytest.raises(
            InputError, match=rf"^rank: {rank}; .* has ranks 0 to 7 \(nearest valid: {near}\)$"
        ):
            ask(rank)


def test_the_example_of_the_documentation():
    cluster = cluster_of(tomllib.loads(EXAMPLE), "example.toml")
    assert (cluster.name, cluster.ranks) == ("two-kinds", 32)
    assert cluster.link_between(0, 16) == Link(25e9 / 8, 30e-6)
    assert cluster.link_between(0, 7) == Link(300e9, 3e-6)
    assert cluster.link_between(0, 8) == catalogue()["a100-80gb"].network
    assert cluster.link_between(16, 20) == catalogue()["v100-16gb"].network
    assert cluster.device_of(16).price_per_hour == 0.9
    assert cluster.device_of(0).price_per_hour is None
    assert cluster.device_of(16).memory_bytes == catalogue()["v100-16gb"].device.memory_bytes


@pytest.mark.parametrize(("rank", "near"), [(32, 31), (99, 31), (-1, 0)])
def test_ranks_that_a_cluster_lacks_are_refused(rank, near):
    cluster = cluster_of(tomllib.loads(EXAMPLE), "example.toml")
    line = rf"^rank: {rank}; two-kinds has ranks 0 to 31 \(nearest valid: {near}\)$"
    with pytest.raises(InputError, match=line):
        cluster.device_of(rank)


NODES = """
[[node]]
name = "some"
count = 3
device = "a100-80gb"
devices = 4
speeds = {speeds}
"""


def test_devices_of_a_node_may_differ_in_speed():
    usual, slow, same = (
        cluster_of(tomllib.loads(NODES.format(speeds=speeds)), "file")
        for speeds in ("[1, 1, 1, 1]", "[1, 1.25, 1, 0.8]", "[1.0, 1.0, 1.0, 1.0]")
    )
    assert [slow.speed_of(rank) for rank in range(12)] == [1.0, 1.25, 1.0, 0.8] * 3
    assert slow.highest_speed == 1.25
    plain = parse_cluster("16xa100-80gb")
    assert (plain.speed_of(11), plain.highest_speed) == (1.0, 1.0)
    assert usual.fingerprint == same.fingerprint != slow.fingerprint
    (group,) = usual.groups
    assert usual.fingerprint == replace(usual, groups=(replace(group, speeds=()),)).fingerprint


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ("[1, 1, 1]", r"node\[0\]\.speeds: has 3 numbers, but a node has 4 devices"),
        ("[]", r"node\[0\]\.speeds: has 0 numbers, but a node has 4 devices"),
        ("[1, 1, 0, 1]", r"node\[0\]\.speeds\[2\]: 0: must be .*0\.001"),
        ("[1, -0.5, 1, 1]", r"node\[0\]\.speeds\[1\]: -0.5: must be .*0\.001"),
        ("[1, 1, 1, 2000]", r"node\[0\]\.speeds\[3\]: 2000: must be .*1000"),
        ('[1, "fast", 1, 1]', r"node\[0\]\.speeds\[1\]: .*number"),
        ("[1, nan, 1, 1]", r"node\[0\]\.speeds\[1\]: .*finite"),
        ("0.8", r"node\[0\]\.speeds: .*list"),
    ],
)
def test_wrong_speeds_are_refused_by_name(speeds, message):
    with pytest.raises(InputError, match=message) as caught:
        cluster_of(tomllib.loads(NODES.format(speeds=speeds)), "file")
    assert len(caught.value.violations) == 1


def test_every_wrong_speed_has_its_line():
    with pytest.raises(InputError) as caught:
        cluster_of(tomllib.loads(NODES.format(speeds="[0, 1, -1, 9999]")), "file")
    assert len(caught.value.violations) == 3


def test_an_expression_becomes_whole_nodes_with_the_usual_network():
    cluster = parse_cluster("64xa100-80gb")
    (group,) = cluster.groups
    assert (group.count, group.devices, cluster.ranks) == (8, 8, 64)
    assert cluster.link_between(0, 63) == catalogue()["a100-80gb"].network
    assert parse_cluster(" 64 x A100-80GB ").fingerprint == cluster.fingerprint


def test_a_sum_is_joined_by_the_slower_network():
    cluster = parse_cluster("8xa100-80gb+16xl4")
    link = cluster.link_between(0, 8)
    assert link == Link(catalogue()["l4"].network.bytes_per_s, catalogue()["l4"].network.latency_s)


def test_less_than_a_node_is_a_part_of_one():
    (group,) = parse_cluster("3xh100-80gb").groups
    assert (group.count, group.devices) == (1, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20xa100-80gb", "nearest valid: 16xa100-80gb+4xa100-80gb"),
        ("8xa100-80", "nearest valid: a100-80gb"),
        ("0xl4", "nearest valid: 1xl4"),
        ("9" * 5000 + "xl4", "1 to 1000000 are allowed"),
        ("a100-80gb", "nearest valid: 1xa100-80gb"),
        ("this-mashine", "nearest valid: this-machine"),
        ("missing.toml", "no such file"),
        ("", "is not this-machine"),
        ("8x", "is not this-machine"),
        ("\0", "is not this-machine"),
        ("x" * 5000, "is not this-machine"),
    ],
)
def test_wrong_expressions_are_refused(text, expected):
    with pytest.raises(InputError) as refused:
        parse_cluster(text)
    assert expected in str(refused.value)


def test_every_wrong_term_is_listed():
    with pytest.raises(InputError) as refused:
        parse_cluster("20xa100-80gb+8xl5+4xt4")
    assert len(refused.value.violations) == 2


def test_the_offered_sum_for_a_partly_used_node_is_valid():
    cluster = parse_cluster("16xa100-80gb+4xa100-80gb")
    assert cluster.ranks == 20
    assert [group.name for group in cluster.groups] == ["a100-80gb", "a100-80gb-2"]


def test_everything_wrong_in_a_file_is_listed_at_once(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
        nmae = "x"
        [[node]]
        name = "one"
        device = "a100-80gb"
        count = 0
        bandwidth = "300 GB"
        [[node]]
        name = "two"
        device = "t4"
        latency = -1
        [[link]]
        between = ["one"]
        bandwidth = 0
        latency = "5 us"
        [device.t4]
        memry = "16 GB"
        flops = { int8 = 1e12 }
        """
    )
    with pytest.raises(InputError) as refused:
        load_cluster(path)
    lines = str(refused.value).splitlines()
    for key in ("nmae", "count", "bandwidth", "latency", "between", "memry", "flops"):
        assert any(key in line for line in lines), key
    assert any("nearest valid: name" in line for line in lines)
    assert any("nearest valid: memory" in line for line in lines)


def test_names_that_do_not_meet_are_listed_at_once():
    text = EXAMPLE.replace('["fast", "old"]', '["fast", "odl"]').replace("[device.v100", "[device.v110")
    text += '[[node]]\nname = "old"\ndevice = "v100-16g"\n'
    with pytest.raises(InputError) as refused:
        cluster_of(tomllib.loads(text), "file")
    found = str(refused.value)
    assert "'odl' is not a group of nodes (nearest valid: old)" in found
    assert "no node has this device" in found
    assert "'old' names two groups" in found
    assert "neither in the catalogue nor described" in found


NEW = '[[node]]\nname = "n"\ncount = 2\ndevice = "mine"\n'
NEW_DEVICE = '[device.mine]\nmemory = "8 GB"\nmemory_bandwidth = "100 GB/s"\nflops = { fp32 = 1e12 }\n'
NEW_LINK = '[[link]]\nbetween = ["n", "n"]\nbandwidth = "1 GB/s"\nlatency = 0\n'
NEW_NODE = 'devices = 4\nbandwidth = "10 GB/s"\nlatency = "1 us"\n'


def test_a_new_device_needs_everything_the_catalogue_would_say():
    complete = cluster_of(tomllib.loads(NEW + NEW_NODE + NEW_LINK + NEW_DEVICE), "file")
    assert complete.device_of(0).flops_per_s == {"fp32": 1e12}
    assert (complete.ranks, complete.name) == (8, "file")
    with pytest.raises(InputError) as refused:
        cluster_of(tomllib.loads(NEW + "[device.mine]\nprice_per_hour = 1.0\n"), "file")
    found = str(refused.value)
    for missing in ("memory:", "memory_bandwidth:", "flops:", "devices:", "bandwidth:", "latency:"):
        assert f"{missing} missing" in found
    assert "missing between 'n' and 'n'" in found


def test_a_reserve_leaves_memory_and_is_written_as_it_was_given() -> None:
    text = '[[node]]\nname = "n"\ndevice = "v100-16gb"\n[device.v100-16gb]\nreserve = "{}"\n'
    found = cluster_of(tomllib.loads(text.format("4 GiB")), "file")
    device = found.groups[0].device
    assert device.usable_bytes == device.memory_bytes - 2**32
    assert cluster_of(tomllib.loads(to_toml(found)), "file") == found
    with pytest.raises(InputError, match=r"device\.'v100-16gb'\.reserve: .* leave nothing"):
        cluster_of(tomllib.loads(text.format("16 GiB")), "file")
