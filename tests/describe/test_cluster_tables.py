"""Clusters written as the tables of a file read back to equal clusters."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_file import cluster_of, parse_cluster
from weft.describe.cluster_tables import to_toml
from weft.describe.device import Device
from weft.errors import InputError

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
speeds = st.floats(min_value=1.0, max_value=1e18)
relative_speeds = st.floats(min_value=0.001, max_value=1000)
links = st.builds(Link, speeds, st.floats(min_value=0, max_value=10))


@st.composite
def devices(draw, name):
    precisions = draw(st.lists(st.sampled_from(["fp64", "fp32", "bf16", "fp16"]), unique=True))
    return Device(
        name=name,
        memory_bytes=draw(st.integers(1, 10**15)),
        memory_bytes_per_s=draw(speeds),
        flops_per_s={precision: draw(speeds) for precision in precisions},
        launch_s=draw(st.floats(min_value=0, max_value=1)),
        synchronous=draw(st.booleans()),
        price_per_hour=draw(st.none() | st.floats(min_value=0, max_value=1e6)),
    )


@st.composite
def clusters(draw):
    kinds = [
        draw(devices(name))
        for name in draw(
            st.lists(names | st.sampled_from(sorted(catalogue())), min_size=1, max_size=3, unique=True)
        )
    ]
    groups = [
        NodeGroup(
            name=name,
            count=draw(st.integers(1, 5)),
            device=draw(st.sampled_from(kinds)),
            devices=(count := draw(st.integers(1, 16))),
            link=draw(links),
            speeds=draw(st.just(()) | st.tuples(*[relative_speeds] * count)),
            interface=draw(st.none() | names),
        )
        for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))
    ]
    pairs = {tuple(sorted((one.name, other.name))): draw(links) for one in groups for other in groups}
    return Cluster(name=draw(names), groups=tuple(groups), links=pairs)


@given(clusters())
def test_a_cluster_reads_back_from_its_file(cluster):
    again = cluster_of(tomllib.loads(to_toml(cluster)), "file")
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint


@given(clusters())
def test_a_plan_does_not_depend_on_the_interface(cluster):
    groups = tuple(replace(one, interface="eth1") for one in cluster.groups)
    assert replace(cluster, groups=groups).fingerprint == cluster.fingerprint


def test_two_devices_of_one_name_cannot_be_written():
    cluster = parse_cluster("1xt4+1xt4")
    other = Device(name="t4", memory_bytes=1, memory_bytes_per_s=1.0)
    groups = (cluster.groups[0], NodeGroup(name="b", count=1, device=other, devices=1, link=Link(1.0, 0.0)))
    with pytest.raises(InputError, match="two different devices"):
        to_toml(Cluster(name="c", groups=groups))
