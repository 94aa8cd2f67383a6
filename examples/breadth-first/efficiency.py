"""Efficiency against loops for depth-first and breadth-first orders, predicted.

The setting of Lamy-Poirier (arXiv 2211.05953): a GPT of 52 billion parameters on 64 V100 of 32 GB in 8 nodes,
tensor degree 8 inside a node, 8 pipeline devices, no data parallelism, micro-batch size 1.

    python examples/breadth-first/efficiency.py
"""

from __future__ import annotations

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.moves.partition import balanced_partition
from weft.planning.compile import compile_plan
from weft.predict.predict import predict
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline

PIPELINE, TENSOR = 8, 8
MICRO_BATCHES = (8, 16, 64)
LOOPS = (1, 2, 4, 8)
PRECISION = "fp16"


def tensor_ranks(device: int) -> tuple[int, ...]:
    """One node's devices hold one stage together."""
    return tuple(range(device * TENSOR, (device + 1) * TENSOR))


def plan_of(graph: LayerGraph, cluster: Cluster, schedule: str, loops: int, micro_batches: int) -> Plan:
    stages = PIPELINE * loops
    shape = Shape(1, graph.sequence, TENSOR)
    parts = balanced_partition([layer.flops(shape) for layer in graph.layers], stages)
    placement = get_schedule(schedule).placement(Pipeline(PIPELINE, stages, micro_batches)).tolist()
    return Plan(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint,
        sequence=graph.sequence,
        global_batch=micro_batches,
        micro_batch_size=1,
        precision=PRECISION,
        mesh={"pp": PIPELINE, "tp": TENSOR},
        stages=tuple(
            Stage(
                layers=tuple(layers),
                replicas=(Replica(ranks=tensor_ranks(device), micro_batches=micro_batches),),
            )
            for layers, device in zip(parts, placement, strict=True)
        ),
        schedule=Choice(name=schedule),
    )


def efficiency(graph: LayerGraph, cluster: Cluster, plan: Plan) -> float:
    """Model flops per second over the peak of all devices; recomputation would not count."""
    predicted = predict(plan, compile_plan(plan, graph), graph, cluster)
    shape = Shape(plan.global_batch, plan.sequence)
    flops = sum(layer.flops(shape) for layer in graph.layers)
    peak = cluster.ranks * cluster.device_of(0).flops_per_s[PRECISION]
    return flops / (predicted.prediction.step_s * peak)


def main() -> None:
    graph = layer_graph(resolve_model("gpt-52b"))
    cluster = parse_cluster("64xv100-32gb")
    print(f"{graph.name} on {cluster.name}, pp {PIPELINE} x tp {TENSOR}, micro-batch size 1, {PRECISION}")
    print(f"{'samples per GPU':<18}{'order':<16}" + "".join(f"{loops:>4} loops" for loops in LOOPS))
    for micro_batches in MICRO_BATCHES:
        for schedule in ("depth-first", "breadth-first"):
            cells = [
                efficiency(graph, cluster, plan_of(graph, cluster, schedule, loops, micro_batches))
                for loops in LOOPS
            ]
            share = f"{micro_batches / cluster.ranks:g}"
            print(f"{share:<18}{schedule:<16}" + "".join(f"{cell:>10.1%}" for cell in cells))


if __name__ == "__main__":
    main()
