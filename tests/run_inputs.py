"""What small runs are made of: the configuration of a GPT, and clusters of one kind of CPU."""

from __future__ import annotations

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


def cluster_text(devices: int, *, nodes: int = 1, precision: str = "fp32") -> str:
    """The file of a cluster with so many devices on each node."""
    link = LINK if nodes > 1 else ""
    return CLUSTER.format(nodes=nodes, devices=devices, precision=precision, link=link)
