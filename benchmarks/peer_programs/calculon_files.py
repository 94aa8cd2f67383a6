"""Calculon's three input files, made from a plan, a model and a cluster.

Sizes of the model come from its config, peaks, memory and links from the cluster. Data sheets do not give
the reached shares of peaks. Those of Calculon's published A100 system stand in (Isaev et al., SC 2023).
They are steps by size of an operation, and factors of links and collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig

DATA_TYPES: Mapping[str, str] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
RECOMPUTE: Mapping[str, str] = {"none": "none", "selective": "attn_only", "full": "full"}
# Capacity is judged by weft, so that plans that do not fit have a step, too: petabytes in their place.
_NO_LIMIT_GIB = 2**20

# What tensor ranks do with the tokens between divided products: each has all of them; each has a share, and
# the gathered ones are kept for backward; the same, and backward gathers them again.
Stream = Literal["whole", "kept", "gathered again"]
Steps = tuple[tuple[float, float], ...]
Scales = Mapping[str, tuple[float, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Reached shares of peaks.

    Attributes:
        matrix, vector: (least GFLOP of an operation, share of the peak), falling.
        memory: (least MB of an operation, share of the bandwidth), falling.
        vector_peak: peak of everything that is no matrix product, over that of matrix products.
        inside, between: share of a link's bandwidth, inside nodes and between them.
        inside_scales, between_scales: by kind of message (factor, offset): of n devices it moves its bytes
            times factor x (1 + offset / n).
        inside_busy, between_busy: share of a device's speed that communication beside it takes.
    """

    matrix: Steps
    vector: Steps
    memory: Steps
    vector_peak: float
    inside: float
    between: float
    inside_scales: Scales
    between_scales: Scales
    inside_busy: float
    between_busy: float


PUBLISHED = Shares(
    matrix=((128, 0.95), (16, 0.9), (1, 0.6), (0, 0.1)),
    vector=((16, 0.95), (1, 0.5), (0, 0.1)),
    memory=((100, 0.9), (10, 0.75), (1, 0.6), (0, 0.3)),
    vector_peak=0.25,
    inside=0.65,
    between=0.9,
    inside_scales={
        "p2p": (1.0, None),
        "reduce_scatter": (1.5, -1),
        "all_gather": (1.5, -1),
        "all_reduce": (2.0, -1),
    },
    between_scales={
        "p2p": (1.0, None),
        "reduce_scatter": (1.0, 0),
        "all_gather": (1.0, 0),
        "all_reduce": (1.0, 0),
    },
    inside_busy=0.15,
    between_busy=0.02,
)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The network of each kind of message: 0 inside nodes, 1 between them."""

    tensor: int
    data: int
    pipeline: int


def tiers_of(layout: Layout, devices: int) -> Tiers:
    """Return the tiers of a layout's messages on nodes of so many devices, ranks in order."""

    def tier(together: int) -> int:
        inside = devices % together == 0 or layout.ranks <= devices
        return 0 if together <= devices and inside else 1

    with_data = layout.tp * layout.dp
    return Tiers(tier(layout.tp), tier(with_data), tier(with_data * layout.pp))


def application(model: ModelConfig, sequence: int) -> dict[str, int]:
    """Sizes of the blocks, which is all of a model that Calculon knows."""
    return {
        "hidden": model.hidden,
        "feedforward": model.feed_forward,
        "seq_size": sequence,
        "attn_heads": model.heads,
        "attn_size": model.hidden // model.heads,
        "num_blocks": model.layers,
    }


def execution(
    layout: Layout, *, global_batch: int, precision: str, stream: Stream, tiers: Tiers
) -> dict[str, Any]:
    """Degrees and choices of a layout."""
    divided = layout.tp > 1 and stream != "whole"
    again = divided and stream == "gathered again" and layout.recompute != "full"
    return {
        "num_procs": layout.ranks,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "tensor_par_net": tiers.tensor,
        "pipeline_par_net": tiers.pipeline,
        "data_par_net": tiers.data,
        "batch_size": global_batch,
        "microbatch_size": layout.micro_batch_size,
        "datatype": DATA_TYPES[precision],
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[layout.recompute],
        "pipeline_interleaving": layout.loops,
        "optimizer_sharding": layout.sharding == "zero-1",
        "tensor_par_comm_type": "rs_ag" if divided else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": again,
        "data_par_overlap": layout.dp > 1 and "reductions" not in layout.blocking,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def system(cluster: Cluster, group: NodeGroup, precision: str, shares: Shares = PUBLISHED) -> dict[str, Any]:
    """One kind of device and its links; a link between nodes is shared by the devices of a node."""
    device, data_type = group.device, DATA_TYPES[precision]
    peak = device.flops_per_s[precision] / 1e12
    between = cluster.links.get((group.name, group.name))
    # One node sends nothing to others.
    each = group.link if between is None else Link(between.bytes_per_s / group.devices, between.latency_s)
    return {
        "matrix": {data_type: {"tflops": peak, "gflops_efficiency": _listed(shares.matrix)}},
        "vector": {
            data_type: {"tflops": shares.vector_peak * peak, "gflops_efficiency": _listed(shares.vector)}
        },
        "mem1": {
            "GiB": _NO_LIMIT_GIB,
            "GBps": device.memory_bytes_per_s / 1e9,
            "MB_efficiency": _listed(shares.memory),
        },
        # Nothing is moved to the host's memory.
        "mem2": {"GiB": _NO_LIMIT_GIB, "GBps": 32, "MB_efficiency": [[0, 1.0]]},
        "processing_mode": "no_overlap",
        "networks": [
            _network(group.link, group.devices, shares.inside, shares.inside_scales, shares.inside_busy),
            _network(each, cluster.ranks, shares.between, shares.between_scales, shares.between_busy),
        ],
    }


def _network(link: Link, size: int, share: float, scales: Scales, busy: float) -> dict[str, Any]:
    return {
        "bandwidth": link.bytes_per_s / 1e9,
        "efficiency": share,
        "size": size,
        "latency": link.latency_s,
        "ops": {name: list(scale) for name, scale in scales.items()},
        "must_be_filled": False,
        "processor_usage": busy,
    }


def _listed(steps: Steps) -> list[list[float]]:
    return [list(step) for step in steps]
