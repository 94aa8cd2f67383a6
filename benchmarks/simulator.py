"""Speed of the simulator: links that are shared, one large pipeline, twelve thousand devices, growth."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import numpy as np
from harness import median_s, print_machine, report
from programs import DEVICES, build, unit_costs

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.planning.compile import compile_plan
from weft.predict.costs import Costs
from weft.predict.predict import predict
from weft.predict.simulator import simulate
from weft.program.kinds import MESSAGES
from weft.program.program import Program
from weft.program.verify import require_valid

MILLION_PER_S = 5.0
PIPELINE_S, CLUSTER_S, CLUSTER_GB = 1.0, 5.0, 2.0


def costs_on_nodes(program: Program, devices_of_node: int) -> Costs:
    """Ten ticks for a computation and three for a message, over its node's link where it leaves the node."""
    columns = program.columns
    sends = np.isin(columns.kind, [send for send, _ in MESSAGES])
    receives = np.isin(columns.kind, [receive for _, receive in MESSAGES])
    here, there = columns.rank // devices_of_node, columns.peer // devices_of_node
    leaves = sends & (here != there)
    links = np.where(leaves[:, None], np.stack([2 * here, 2 * there + 1], axis=1), -1)
    occupancy = np.where(sends, 3, np.where(receives, 0, 10))
    return replace(unit_costs(program), occupancy=occupancy, links=links)


def rate(program: Program, costs: Costs, what: str) -> None:
    """Instructions per second of one cycle, warm."""
    warm_s = median_s(lambda: simulate(program, costs, max_cycles=1, compiled=True), 3)
    reached = len(program) / warm_s / 1e6
    verdict = "met" if reached >= MILLION_PER_S else "MISSED"
    report(f"simulate one cycle, {what}", warm_s)
    print(f"{reached:.2f} million instructions/s (target {MILLION_PER_S:g}: {verdict})")


def cold() -> None:
    """The first simulation of a process that uses the compiled engine."""
    program = build(devices=2, micro_batches=2)
    start = time.perf_counter()
    simulate(program, costs_on_nodes(program, 1), max_cycles=1, compiled=True)
    report("simulate a small program, cold (loads the compiled engine)", time.perf_counter() - start)


def pipeline() -> None:
    """64 devices, 8 loops, 128 micro-batches, breadth first."""
    program = build()
    shared = costs_on_nodes(program, 8)
    rate(program, replace(shared, links=None), "nothing shared")
    rate(program, shared, "8 devices share a node's link")
    rate(program, costs_on_nodes(program, 1), "every message on a shared link")

    def whole() -> None:
        built = build()
        require_valid(built)
        simulate(built, costs_on_nodes(built, 8), max_cycles=1)

    report(f"compile, verify and simulate {len(program)} instructions", median_s(whole, 3), PIPELINE_S)


def gpt3_plan() -> Plan:
    """`gpt3-175b` on 12,288 A100: 8 tensor lanes, 8 devices, 6 loops, 192 replicas, batch 6144."""
    tensor, devices, loops, replicas, batch = 8, 8, 6, 192, 6144
    graph = layer_graph(resolve_model("gpt3-175b"))
    cluster = parse_cluster("12288xa100-80gb")
    stages = devices * loops
    cuts = [len(graph.layers) * stage // stages for stage in range(stages + 1)]

    def copy(stage: int, replica: int) -> Replica:
        first = (replica * devices + stage % devices) * tensor
        return Replica(ranks=tuple(range(first, first + tensor)), micro_batches=batch // replicas)

    return Plan(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint,
        sequence=graph.sequence,
        global_batch=batch,
        micro_batch_size=1,
        precision="bf16",
        mesh={"dp": replicas, "pp": devices, "tp": tensor},
        stages=tuple(
            Stage(
                layers=tuple(range(cuts[stage], cuts[stage + 1])),
                replicas=tuple(copy(stage, replica) for replica in range(replicas)),
            )
            for stage in range(stages)
        ),
        schedule=Choice(name="breadth-first"),
    )


def large_cluster() -> None:
    """The plan is made by hand and shards nothing, so that it would not fit the devices' memory; its replicas
    are folded, its tensor lanes are not."""
    graph, cluster = layer_graph(resolve_model("gpt3-175b")), parse_cluster("12288xa100-80gb")
    start = time.perf_counter()
    plan = gpt3_plan()
    planned = time.perf_counter()
    program = compile_plan(plan, graph, only_replica=0)
    compiled = time.perf_counter()
    predicted = predict(plan, program, graph, cluster)
    end = time.perf_counter()
    report("gpt3-175b on 12,288 A100: write the plan down", planned - start)
    report(f"compile it to {len(program)} instructions of one replica", compiled - planned)
    report(f"price and simulate {predicted.simulation.cycles} cycles of it", end - compiled)
    report("together", end - start, CLUSTER_S)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    verdict = "met" if peak_gb <= CLUSTER_GB else "MISSED"
    print(f"peak memory of the process {peak_gb:.2f} GB (target {CLUSTER_GB:g} GB: {verdict})")
    print(
        f"predicted step {predicted.prediction.step_s:.2f} s; peak {max(predicted.prediction.peak_bytes)} B"
    )


def growth() -> None:
    """One cycle, 8 devices to a node, by pipeline devices and by micro-batches."""
    for devices, micro_batches in ((16, 128), (32, 128), (64, 128), (64, 32), (64, 64), (64, 256)):
        program = build(devices=devices, micro_batches=micro_batches)
        costs = costs_on_nodes(program, 8)
        seconds = median_s(lambda p=program, c=costs: simulate(p, c, max_cycles=1, compiled=True), 3)
        report(f"{devices} devices, {micro_batches} micro-batches: {len(program)} instructions", seconds)


def main() -> None:
    print_machine()
    cold()
    large_cluster()
    print(f"{DEVICES} devices")
    pipeline()
    growth()


if __name__ == "__main__":
    main()
