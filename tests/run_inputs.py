"""What small runs are made of: the configuration of a GPT, and clusters of one kind of CPU."""

from __future__ import annotations

from pathlib import Path

CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 16,
    "tie_word_embeddings": False,
}
CLUSTER = """
name = "small"
[[node]]
name = "all"
count = {nodes}
device = "cpu"
devices = {devices}
bandwidth = "1 GB/s"
latency = "50 us"
{link}
[device.cpu]
flops = {{ {precision} = "50 GFLOP/s" }}
memory = "4 GB"
memory_bandwidth = "10 GB/s"
launch = "1 us"
synchronous = true
"""
LINK = """[[link]]
between = ["all", "all"]
bandwidth = "1 GB/s"
latency = "50 us"
"""
ON_NODES = """
[model]
preset = "gpt-1m"
[task]
data = "{folder}/text.txt"
sequence = 16
[train]
steps = {steps}
global_batch = 8
{train}
[checkpoint]
every = {every}
[cluster]
use = "{folder}/cluster.toml"
[plan]
pp = 2
dp = 2
micro_batch_size = 2
sharding = "zero-1"
"""


def cluster_text(devices: int, *, nodes: int = 1, precision: str = "fp32") -> str:
    """The file of a cluster with so many devices on each node."""
    link = LINK if nodes > 1 else ""
    return CLUSTER.format(nodes=nodes, devices=devices, precision=precision, link=link)


def run_on_nodes(folder: Path, cluster: str, *, steps: int, every: int | str = 20, train: str = "") -> Path:
    """Write a run of four ranks on nodes, its text and its cluster file; `train` has more keys of [train]."""
    (folder / "text.txt").write_text("the weft goes under and over the warp\n" * 100)
    (folder / "cluster.toml").write_text(cluster)
    path = folder / "run.toml"
    path.write_text(ON_NODES.format(folder=folder, steps=steps, every=every, train=train))
    return path
