"""Links that nobody stated are named among the assumptions, with the cost of half of their bandwidth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import load_cluster, parse_cluster
from weft.describe.this_machine import this_machine
from weft.planning.assumed_links import assumed_links
from weft.predict.measurements import UNMEASURED, Measurements
from weft.predict.profile import MachineMeasurement

BETWEEN, INSIDE = "network_between_nodes", "links_inside_nodes"
FILE = """
[[node]]
name = "mine"
count = 2
device = "t4"
devices = 2
"""
INSIDE_KEYS = """bandwidth = "16 GB/s"
latency = "10 us"
"""
LINK = """
[[link]]
between = ["mine", "mine"]
bandwidth = "3 Gbit/s"
latency = "40 us"
"""


def keys(cluster: Cluster) -> list[str]:
    return [one.key for one in assumed_links(cluster, UNMEASURED)]


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        (FILE, [BETWEEN, INSIDE]),
        (FILE + INSIDE_KEYS, [BETWEEN]),
        (FILE + LINK, [INSIDE]),
        (FILE + INSIDE_KEYS + LINK, []),
        (FILE.replace("count = 2", "count = 1"), [INSIDE]),
        (FILE.replace("devices = 2", "devices = 1"), [BETWEEN]),
    ],
)
def test_what_a_file_states_is_not_assumed(tmp_path: Path, text: str, assumed: list[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert keys(load_cluster(path)) == assumed


def test_where_some_links_are_stated_the_others_are_named_with_their_own_devices(tmp_path: Path) -> None:
    text = FILE + INSIDE_KEYS + '[[node]]\nname = "one"\ncount = 1\ndevice = "v100-32gb"\ndevices = 8\n'
    between = LINK.replace('["mine", "mine"]', '["mine", "one"]')
    path = tmp_path / "cluster.toml"
    path.write_text(text + between)
    network, inside = assumed_links(load_cluster(path), UNMEASURED)
    assert network.words.startswith("mine ")
    assert network.words.endswith(", usual for t4")
    assert inside.words.startswith("one ")
    assert inside.words.endswith(", usual for v100-32gb")


@pytest.mark.parametrize(
    ("expression", "assumed"),
    [("64xa100-80gb", [BETWEEN, INSIDE]), ("8xa100-80gb", [INSIDE]), ("1xa100-80gb", [])],
)
def test_every_link_of_an_expression_is_assumed(expression: str, assumed: list[str]) -> None:
    assert keys(parse_cluster(expression)) == assumed


@settings(max_examples=20, deadline=None)
@given(nodes=st.integers(1, 4), other=st.booleans())
def test_half_of_a_link_changes_nothing_else(nodes: int, other: bool) -> None:
    cluster = parse_cluster(f"{8 * nodes}xa100-80gb" + ("+8xt4" if other else ""))
    for one in assumed_links(cluster, UNMEASURED):
        for group, halved in zip(cluster.groups, one.halved.groups, strict=True):
            share = 0.5 if one.key == INSIDE else 1.0
            assert halved.link.bytes_per_s == share * group.link.bytes_per_s
            assert replace(halved, link=group.link) == group
        for pair, link in cluster.links.items():
            share = 0.5 if one.key == BETWEEN else 1.0
            assert one.halved.links[pair].bytes_per_s == share * link.bytes_per_s


def test_a_measured_link_is_not_assumed() -> None:
    cluster = replace(this_machine(), groups=(replace(this_machine().groups[0], devices=2),))
    machine = MachineMeasurement(
        device="cpu",
        matmul={},
        memory=(),
        launch_s=1e-6,
        instruction_s=1e-5,
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        message=((0.0, 1e-5), (1e6, 1e-3)),
        collectives={},
        spread=0.1,
    )
    assert keys(cluster) == [INSIDE]
    assert assumed_links(cluster, Measurements(machine=machine)) == []


def test_half_of_the_network_costs_a_plan_that_uses_it() -> None:
    job = weft.plan(model="gpt2", on="16xt4", global_batch=32, dp=16).job
    assert list(job.steps_at_half) == [BETWEEN, INSIDE] == list(job.problem.assumed)[:2]
    assert job.steps_at_half[BETWEEN] > 1.05 * job.prediction.step_s
    assert weft.plan(model="gpt2", on="1xt4", global_batch=8).job.steps_at_half == {}
