"""Speed of the simulator: links that are shared, one large pipeline, twelve thousand devices, growth."""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from functools import partial

import numpy as np
from figures import Value
from harness import Report, parser, timed
from programs import build, unit_costs

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.planning.compile import compile_folded, compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.kinds import MESSAGES
from weft.program.program import Program
from weft.program.verify import require_valid

PER_S = 5e6
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


def rate(report: Report, program: Program, costs: Costs, what: str) -> None:
    """Instructions per second of one cycle, warm."""
    if not report.missing(f"{what}, warm"):
        return
    warm = timed(lambda: simulate(program, costs, max_cycles=1, compiled=True), 3)
    assert warm.low is not None
    assert warm.high is not None
    per_s, low, high = (len(program) / seconds for seconds in (warm.value, warm.high, warm.low))
    report.add(f"{what}, warm", Value(per_s, "per s", PER_S, met=per_s >= PER_S, low=low, high=high))


def cold(report: Report) -> None:
    """The first simulation of a process that uses the compiled engine."""
    if report.missing(name := "a small program, cold (loads the compiled engine)"):
        program = build(devices=2, micro_batches=2)
        start = time.perf_counter()
        simulate(program, costs_on_nodes(program, 1), max_cycles=1, compiled=True)
        report.add(name, Value(time.perf_counter() - start, "s"))


def pipeline(report: Report) -> None:
    """64 devices, 8 loops, 128 micro-batches, breadth first."""
    program = build()
    shared = costs_on_nodes(program, 8)
    rate(report, program, replace(shared, links=None), "nothing shared")
    rate(report, program, shared, "the 8 devices of a node share its link")
    every = costs_on_nodes(program, 1)
    rate(report, program, every, "every message on a shared link")
    factors = np.full(program.ranks, 1.25)
    disturbed = replace(every, compute_slowdown=factors, communication_slowdown=factors)
    rate(
        report,
        program,
        disturbed,
        "the same, and messages and computations of every rank slow each other",
    )

    def whole() -> None:
        built = build()
        require_valid(built)
        simulate(built, costs_on_nodes(built, 8), max_cycles=1)

    name = "64 devices, 8 loops, 128 micro-batches: built, verified and simulated"
    report.time(name, whole, 3, target_s=PIPELINE_S)


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


def one_step(
    report: Report, what: str, cluster: Cluster, *, folded: bool, target_s: float, target_gb: float
) -> None:
    """Plan, compile, price and simulate one step; the peak is that of the whole process so far."""
    if not report.missing(what):
        return
    graph = layer_graph(resolve_model("gpt3-175b"))
    marks = [time.perf_counter()]
    core_s = time.process_time()
    found: dict[str, Value] = {}

    def mark(phase: str) -> None:
        marks.append(time.perf_counter())
        found[phase] = Value(marks[-1] - marks[-2], "s")

    plan = gpt3_plan(graph, cluster)
    mark("write the plan down")
    program = compile_folded(plan, graph, cluster) if folded else compile_plan(plan, graph)
    mark("compile")
    priced = price(CostModel(graph=graph, cluster=cluster), program, plan)
    mark("price")
    simulation = simulate(program, priced.costs)
    mark("simulate")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.add_cell(
        what,
        {
            **found,
            "together": Value(marks[-1] - marks[0], "s", target_s),
            "of which this process had a core": Value(time.process_time() - core_s, "s"),
            "peak memory of the process": Value(peak_bytes, "bytes", target_gb * 1e9),
        },
    )
    report.say(
        f"{len(program)} instructions of {len(np.unique(program.columns.rank))} ranks, "
        f"{simulation.cycles} cycles, step {simulation.step_s:.2f} s, "
        f"{'steady' if simulation.steady else 'NOT STEADY'}"
    )


def folded_cluster(report: Report) -> None:
    """Equal devices: one replica and one tensor lane stand for all."""
    cluster = parse_cluster(f"{LARGE}xa100-80gb")
    for state in ("cold", "warm"):
        what = f"gpt3-175b on {LARGE} A100, folded, {state}"
        one_step(report, what, cluster, folded=True, target_s=CLUSTER_S, target_gb=CLUSTER_GB)


def unequal_cluster(report: Report) -> None:
    """One device of every node is slower, so that every device of the cluster is simulated."""
    cluster = parse_cluster(f"{LARGE}xa100-80gb")
    (group,) = cluster.groups
    speeds = (1.0,) * (group.devices - 1) + (SLOW,)
    cluster = replace(cluster, groups=(replace(group, speeds=speeds),))
    what = f"gpt3-175b on {LARGE} A100, one device of each node at {SLOW:g} of its speed, nothing folded"
    one_step(report, what, cluster, folded=False, target_s=UNEQUAL_S, target_gb=UNEQUAL_GB)


def share_of(parts: int, whole_s: float) -> float:
    return whole_s / parts


def growth(report: Report) -> None:
    """One cycle, 8 devices to a node, by devices, by micro-batches and by loops."""
    sizes = [(devices, 128, 8) for devices in (8, 16, 32, 64)]
    sizes += [(64, micro_batches, 8) for micro_batches in (32, 64, 256)]
    sizes += [(64, 128, loops) for loops in (1, 2, 4)]
    for devices, micro_batches, loops in sizes:
        what = f"one cycle of {devices} devices, {micro_batches} micro-batches, {loops} loops"
        if report.missing(what):
            program = build(devices, micro_batches, loops)
            costs = costs_on_nodes(program, 8)
            whole = timed(partial(simulate, program, costs, max_cycles=1, compiled=True), 3)
            each = whole.changed(partial(share_of, len(program)))
            report.add_cell(what, {"one cycle": whole, "each instruction": each})


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("simulator", options().parse_args())
    report.print_machine()
    cold(report)
    folded_cluster(report)
    pipeline(report)
    growth(report)
    unequal_cluster(report)


if __name__ == "__main__":
    main()
