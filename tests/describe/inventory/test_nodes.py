"""Lists of nodes, in the forms that Slurm's and Kubernetes' documents show."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.nodes import read_nodes
from weft.describe.inventory.slurm import expanded
from weft.errors import InputError

SCONTROL = """\
NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   AvailableFeatures=a100_80gb,ib
   ActiveFeatures=a100_80gb,ib
   Gres=gpu:a100:4(S:0-3)
   OS=Linux 5.14.0-362.el9 #1 SMP PREEMPT_DYNAMIC
   State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   CfgTRES=cpu=64,mem=500G,billing=64,gres/gpu=4,gres/gpu:a100=4

NodeName=gpu02 Arch=x86_64
   AvailableFeatures=(null)
   Gres=(null)
   State=IDLE+DRAIN ThreadsPerCore=1
   CfgTRES=cpu=64,gres/gpu=2
   Reason=fan State=DOWN Gres=gpu:t4:1

NodeName=both
   Gres=gpu:a100:1,gpu:a100_1g.10gb:7,shard:a100:4
   State=IDLE*
NodeName=login State=IDLE
"""
READ = (
    ListedNode(name="gpu01", device="a100", devices=4, hints=("a100_80gb", "ib")),
    ListedNode(name="gpu02", device="", devices=2, unusable="DRAIN"),
    ListedNode(name="both", device="a100", devices=1, unusable="IDLE*"),
    ListedNode(name="both", device="a100_1g.10gb", devices=7, unusable="IDLE*"),
    ListedNode(name="login", device="", devices=0),
)


def test_scontrol_shows_nodes_on_many_lines_and_on_one() -> None:
    assert read_nodes(SCONTROL, "x") == READ
    single = "\n".join("NodeName=" + " ".join(part.split()) for part in SCONTROL.split("NodeName=")[1:])
    assert read_nodes(single, "x") == READ


def test_a_configuration_file_lists_nodes_by_ranges_and_defaults() -> None:
    text = """\
# NodeName=never Gres=gpu:t4:1
NodeName=DEFAULT Features=ib Gres=gpu:v100:4
NodeName=n[1-2] CPUs=40 \\
   State=UNKNOWN_NOT
NodeName=big Gres=gpu:h100:8
PartitionName=all Nodes=ALL Gres=gpu:t4:1
"""
    assert [(node.name, node.device, node.devices) for node in read_nodes(text, "x")] == [
        ("n1", "v100", 4),
        ("n2", "v100", 4),
        ("big", "h100", 8),
    ]


def test_the_state_of_nodes_is_unknown_to_a_configuration_file_only() -> None:
    for text, unusable in (
        ("NodeName=n1 Gres=gpu:a100:8 CPUs=64 State=UNKNOWN", ""),
        ("NodeName=DEFAULT State=UNKNOWN\nNodeName=n1 Gres=gpu:a100:8", ""),
        ("NodeName=n1 Gres=gpu:a100:8 State=DOWN", "DOWN"),
        ("NodeName=n1 Gres=gpu:a100:8 State=MAINT", "MAINT"),
        ("NodeName=n1 Arch=x86_64\n   Gres=gpu:a100:8\n   State=UNKNOWN", "UNKNOWN"),
    ):
        [node] = read_nodes(text, "x")
        assert (node.devices, node.unusable) == (8, unusable)


@given(st.integers(0, 99), st.integers(0, 30), st.integers(1, 4))
def test_a_host_list_counts_with_its_leading_zeros(first: int, more: int, width: int) -> None:
    numbers = [f"{first:0{width}}", f"{first + more:0{width}}"]
    names = list(expanded(f"login,n[{'-'.join(numbers)},x]-ib,r[1-2]c[3-4]"))
    assert names[0] == "login"
    assert names[1 : more + 2] == [
        f"n{number:0{len(numbers[0])}}-ib" for number in range(first, first + more + 1)
    ]
    assert names[-4:] == ["r1c3", "r1c4", "r2c3", "r2c4"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("a-[3-1]", "a range has 1 to"),
        ("a-[1-100000000]", "a range has 1 to"),
        ("a-[1-2", "a bracket is not closed"),
    ],
)
def test_a_host_list_without_names_is_refused_with_its_text(names: str, problem: str) -> None:
    with pytest.raises(InputError, match=rf"NodeName={re.escape(names)}: {problem}"):
        read_nodes(f"NodeName={names} Gres=gpu:h100:8", "slurm.conf")


def test_json_of_scontrol_and_of_sinfo() -> None:
    shown = {
        "nodes": [
            {"name": "a", "gres": "gpu:h100:8(S:0-1)", "state": ["IDLE"], "features": ["ib"], "cpus": 4},
            {
                "name": "b",
                "gres": "",
                "tres": "cpu=4,gres/gpu:l4=2",
                "state": "idle",
                "state_flags": ["DRAIN"],
            },
        ]
    }
    assert read_nodes(json.dumps(shown), "x") == (
        ListedNode(name="a", device="h100", devices=8, hints=("ib",)),
        ListedNode(name="b", device="l4", devices=2, unusable="DRAIN"),
    )
    row = {"nodes": {"nodes": ["a", "b"]}, "node": {"state": ["MIXED"]}, "gres": {"total": "gpu:t4:4"}}
    nodes = read_nodes(json.dumps({"sinfo": [row, row]}), "x")
    # A node of two partitions is one node.
    assert [(node.name, node.device, node.devices) for node in nodes] == [("a", "t4", 4), ("b", "t4", 4)]


def kubernetes(labels: dict[str, str], allocatable: str, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "node", "labels": labels},
        "status": {
            "allocatable": {"nvidia.com/gpu": allocatable, "cpu": "95"},
            "conditions": [{"type": "Ready", "status": more.pop("ready", "True")}],
        },
        "spec": more,
    }


@pytest.mark.parametrize(
    ("record", "node"),
    [
        (
            kubernetes(
                {
                    "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED",
                    "nvidia.com/gpu.count": "8",
                    "nvidia.com/gpu.memory": "81920",
                },
                "32",
            ),
            ListedNode(name="node", device="NVIDIA-A100-SXM4-80GB", devices=8, memory_bytes=80 * 2**30),
        ),
        # One of eight devices is out of order: pods get seven.
        (
            kubernetes({"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "8"}, "7"),
            ListedNode(name="node", device="Tesla-T4", devices=7),
        ),
        (
            kubernetes({"cloud.google.com/gke-accelerator": "nvidia-l4"}, "2", unschedulable=True),
            ListedNode(name="node", device="nvidia-l4", devices=2, unusable="cordoned"),
        ),
        (
            kubernetes({}, "2", ready="Unknown"),
            ListedNode(name="node", device="", devices=2, unusable="not ready"),
        ),
    ],
)
def test_nodes_of_kubernetes(record: dict[str, Any], node: ListedNode) -> None:
    assert read_nodes(json.dumps({"kind": "List", "items": [record]}), "x") == (node,)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "x: no list of nodes; weft reads scontrol"),
        ("hello", "x: no list of nodes"),
        ("{}", "x: no list of nodes"),
        ("{", "x: not valid JSON"),
        ('{"items": 3}', "x: items"),
        ('{"items": [{"metadata": {}}]}', r"x: items\[0\].metadata.name"),
        ("[" * 100_000, "x: no list of nodes"),
    ],
)
def test_other_texts_are_refused_with_one_line(text: str, line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        read_nodes(text, "x")
    assert len(refused.value.violations) == 1
