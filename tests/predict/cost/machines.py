"""Devices, clusters and measurements for tests of the cost model."""

from __future__ import annotations

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.predict.profile import LayerProfile, LayerTiming, MachineMeasurement

GPU = Device(
    name="gpu",
    memory_bytes=80 * 10**9,
    memory_bytes_per_s=2e12,
    flops_per_s={"bf16": 300e12, "fp32": 20e12},
    launch_s=5e-6,
)
CPU = Device(
    name="cpu",
    memory_bytes=8 * 10**9,
    memory_bytes_per_s=2e10,
    flops_per_s={"fp32": 1e11},
    launch_s=5e-6,
    synchronous=True,
)
INSIDE = Link(300e9, 3e-6)
BETWEEN = Link(50e9, 10e-6)

MODEL = ModelConfig(
    name="small",
    family="gpt",
    layers=4,
    hidden=64,
    heads=4,
    key_value_heads=4,
    feed_forward=256,
    vocabulary=128,
    sequence=32,
)


def cluster(nodes: int = 2, devices: int = 4, device: Device = GPU) -> Cluster:
    group = NodeGroup(name="node", count=nodes, device=device, devices=devices, link=INSIDE)
    return Cluster(name="cluster", groups=(group,), links={("node", "node"): BETWEEN})


MACHINE = MachineMeasurement(
    device="cpu",
    matmul={"fp32": ((1e5, 1e9), (1e8, 5e10))},
    memory=((65536.0, 1e9), (1e8, 1e10)),
    launch_s=4e-6,
    instruction_s=3e-5,
    compute_slowdown=1.0,
    communication_slowdown=1.0,
    message=((0.0, 1e-4), (1e6, 1.1e-3)),
    collectives={"all_reduce": {2: ((4096.0, 2e-4), (1e6, 1.2e-3))}},
    spread=0.05,
)


def profile_of(
    graph: LayerGraph, *, spread: float = 0.02, device: str = "cpu", tp: int = 1, times: float = 1.0
) -> LayerProfile:
    """Per sample 1 ms forward, 2 ms backward and 1000 bytes; 1 ms more for each pass; 4 ms for an update.

    Seconds are multiplied by `times`.
    """
    return LayerProfile(
        model_fingerprint=graph.fingerprint,
        sequence=graph.sequence,
        precision="fp32",
        timings=tuple(
            LayerTiming(
                device=device,
                layer=kind,
                tp=tp,
                micro_batch_size=size,
                forward_s=1e-3 * (size + 1) * times,
                backward_s=1e-3 * (2 * size + 1) * times,
                update_s=4e-3 * times,
                activation_bytes=1000 * size,
            )
            for kind in ("embedding", "block", "head")
            for size in (1, 2, 8)
        ),
        spread=spread,
    )
