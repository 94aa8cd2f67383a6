"""Speed of the simulator: links that are shared, one large pipeline, twelve thousand devices, growth."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import numpy as np
from harness import median_s, print_machine, report
from programs import DEVICES, build, unit_costs

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.planning.compile import compile_folded, compile_plan
from weft.predict.cost.cost_model import CostModel
from weft.predict.cost.price import price
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.kinds import MESSAGES
from weft.program.program import Program
from weft.program.verify import require_valid

MILLION_PER_S = 5.0
PIPELINE_S, CLUSTER_S, CLUSTER_GB = 1.0, 5.0, 2.0
UNEQUAL_S, UNEQUAL_GB = 60.0, 16.0
LARGE, SLOW = 12288, 0.8


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
    every = costs_on_nodes(program, 1)
    rate(program, every, "every message on a shared link")
    factors = np.full(program.ranks, 1.25)
    disturbed = replace(every, compute_slowdown=factors, communication_slowdown=factors)
    rate(program, disturbed, "and every rank's messages and computations slow each other")

    def whole() -> None:
        built = build()
        require_valid(built)
        simulate(built, costs_on_nodes(built, 8), max_cycles=1)

    report(f"compile, verify and simulate {len(program)} instructions", median_s(whole, 3), PIPELINE_S)


def gpt3_plan(graph: LayerGraph, cluster: Cluster) -> Plan:
    """`gpt3-175b` on 12,288 A100: 8 tensor lanes, 8 devices, 6 loops, 192 replicas, batch 6144.

    Made by hand: it shards nothing, so that it would not fit the devices' memory.
    """
    tensor, devices, loops, replicas, batch = 8, 8, 6, 192, 6144
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


def one_step(what: str, cluster: Cluster, *, folded: bool, target_s: float, target_gb: float) -> None:
    """Plan, compile, price and simulate one step; the peak is that of the whole process so far."""
    graph = layer_graph(resolve_model("gpt3-175b"))
    marks = [time.perf_counter()]
    core_s = time.process_time()

    def mark(phase: str) -> None:
        marks.append(time.perf_counter())
        report(f"  {phase}", marks[-1] - marks[-2])

    print(what)
    plan = gpt3_plan(graph, cluster)
    mark("write the plan down")
    program = compile_folded(plan, graph, cluster) if folded else compile_plan(plan, graph)
    mark(f"compile it to {len(program)} instructions of {len(np.unique(program.columns.rank))} ranks")
    priced = price(CostModel(graph=graph, cluster=cluster), program, plan)
    mark("price")
    simulation = simulate(program, priced.costs)
    mark(f"simulate {simulation.cycles} cycles")
    core_s = time.process_time() - core_s
    report("  together", marks[-1] - marks[0], target_s)
    report("  of which this process had a core", core_s)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    verdict = "met" if peak_gb <= target_gb else "MISSED"
    print(f"  peak memory of the process {peak_gb:.2f} GB (target {target_gb:g} GB: {verdict})")
    print(f"  step {simulation.step_s:.2f} s, {'steady' if simulation.steady else 'NOT STEADY'}")


def folded_cluster() -> None:
    """Equal devices: one replica and one tensor lane stand for all."""
    cluster = parse_cluster(f"{LARGE}xa100-80gb")
    for state in ("cold", "warm"):
        what = f"gpt3-175b on {LARGE} A100, folded, {state}"
        one_step(what, cluster, folded=True, target_s=CLUSTER_S, target_gb=CLUSTER_GB)


def unequal_cluster() -> None:
    """One device of every node is slower, so that every device of the cluster is simulated."""
    cluster = parse_cluster(f"{LARGE}xa100-80gb")
    (group,) = cluster.groups
    speeds = (1.0,) * (group.devices - 1) + (SLOW,)
    cluster = replace(cluster, groups=(replace(group, speeds=speeds),))
    what = f"gpt3-175b on {LARGE} A100, one device of each node at {SLOW:g} of its speed, nothing folded"
    one_step(what, cluster, folded=False, target_s=UNEQUAL_S, target_gb=UNEQUAL_GB)


def growth() -> None:
    """One cycle, 8 devices to a node, by devices, by micro-batches and by loops."""
    print(f"{'devices':>8} {'micro-batches':>14} {'loops':>6} {'instructions':>13} {'ms':>9} {'ns each':>8}")
    sizes = [(devices, 128, 8) for devices in (8, 16, 32, 64)]
    sizes += [(64, micro_batches, 8) for micro_batches in (32, 64, 128, 256)]
    sizes += [(64, 128, loops) for loops in (1, 2, 4, 8)]
    for devices, micro_batches, loops in sizes:
        program = build(devices, micro_batches, loops)
        costs = costs_on_nodes(program, 8)
        seconds = median_s(lambda p=program, c=costs: simulate(p, c, max_cycles=1, compiled=True), 3)
        each_ns = seconds / len(program) * 1e9
        row = f"{devices:>8} {micro_batches:>14} {loops:>6} {len(program):>13}"
        print(f"{row} {seconds * 1e3:>9.1f} {each_ns:>8.0f}")


def main() -> None:
    print_machine()
    cold()
    folded_cluster()
    print(f"{DEVICES} devices")
    pipeline()
    growth()
    unequal_cluster()


if __name__ == "__main__":
    main()
