"""Bandwidth, latency and algorithms of the collective library of GPUs.

CPUs of a cluster use gloo, whose collectives follow the description of the links. GPUs use NVIDIA's NCCL or
its like. Its own model (`src/graph/tuning.cc`) has the form of `ring_s`. It adds a start and a latency for
each step, inside a node or between nodes. Bytes pass at the slower bandwidth. A ring has one lane for each
network card, so that all cards of a node carry it. All-gathers and reduce-scatters are rings. All-reduces may
be trees. From Hopper on, NVSwitches add up an all-reduce inside a node (NVLS).

The constants are fitted to published runs of nccl-tests. `tests/predict/cost/nccl_tests.csv` names each
source. They are of nodes with eight A100, H100, H200 and B200, and of up to 16 nodes. NCCL's maintainers
state 80 % of an NVLink (github.com/NVIDIA/nccl-tests, issue 212). Of a network card with 50 GB/s they state
46 to 48 GB/s (issue 290).
"""

from __future__ import annotations

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Link, NodeGroup

# Shares of the peak of a link that a collective's kernels get inside a node, and between nodes.
SHARE_INSIDE = 0.72
SHARE_BETWEEN = 0.92
# Times until all lanes of a ring or of a tree are busy, in host launches of 5 us.
RING_START_LAUNCHES = 12.0
TREE_START_LAUNCHES = 3.0
# A step of a ring between nodes passes a thread of either host beside the link; in host launches.
HOST_STEP_LAUNCHES = 2.0
# An all-reduce in the switches: the share of the link's peak at which all bytes pass once, its start in host
# launches, and the least number of ranks for which NCCL chooses it.
SHARE_IN_SWITCH = 0.57
IN_SWITCH_START_LAUNCHES = 10.0
IN_SWITCH_RANKS = 5
# Half-width of the 90 % interval: so many of the fitted times are within it.
HALF_WIDTH = 0.26


def reached(link: Link, *, inside: bool) -> Link:
    """Return a link with the bandwidth that kernels of collectives get."""
    return Link(link.bytes_per_s * (SHARE_INSIDE if inside else SHARE_BETWEEN), link.latency_s)


def ring_s(ranks: int, nodes: int, inside_s: float, between_s: float, launch_s: float) -> float:
    """Return the seconds of a reduce-scatter or an all-gather of no bytes, by the latencies of steps."""
    between = (nodes - 1) * (between_s + HOST_STEP_LAUNCHES * launch_s)
    return RING_START_LAUNCHES * launch_s + (ranks - nodes) * inside_s + between


def adds_in_switch(group: NodeGroup, ranks: int) -> bool:
    """Return True if the switches of a group's nodes add up all-reduces of so many ranks of one node."""
    entry = catalogue().get(group.device.name)
    if entry is None or not entry.adds_in_switch or ranks < IN_SWITCH_RANKS:
        return False
    # Nodes with other links than the usual ones have no such switch.
    return group.link.bytes_per_s >= entry.link.bytes_per_s / 2.0


def in_switch_s(link: Link, reduced_bytes: float, launch_s: float) -> float:
    """Return the seconds of an all-reduce that the switches of a node add up."""
    return IN_SWITCH_START_LAUNCHES * launch_s + reduced_bytes / (SHARE_IN_SWITCH * link.bytes_per_s)
