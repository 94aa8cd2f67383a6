"""Plans of stages that form a graph, beside those of PipeDream, Piper, equal stages and weft's own chains.

    python benchmarks/graph_planners.py [--devices 8,32]

`graphpipe` splits backwards, which the published planners do not. So it also plans without, and with the size
of micro-batches of the best published plan. All rows of stages run by the edges of the layers, so branches of
published plans run side by side, too. In their own systems they do not: there the model is a chain. So the
published planners also plan the flattened model. At last Uno gets more and more branches.

Steps are predicted on V100 with 4 devices to a node and 100 Gb/s between nodes, as in GraphPipe's comparison
(arXiv 2406.17145, appendix A.2). Replicas keep whole states, and layers are not divided. Searches are seconds
of the processor, once each. No plan is no gain: such baselines are left out of ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from figures import Value
from harness import Report, parser

from weft.describe.cluster import Cluster, Link
from weft.describe.families import layer_graph
from weft.describe.graph_models import tower_config
from weft.describe.layer_graph import chain_edges
from weft.describe.layout import PartialLayout
from weft.planning.planners import PLANNERS, Candidate, Planner
from weft.planning.planners.graphpipe import GraphPipePlanner
from weft.planning.planners.graphpipe.plans import CHAIN_SCHEDULE, depth_of
from weft.planning.problem import Problem, problem_of
from weft.program.schedules.ring import divisors

DEVICES = (4, 8, 16, 32)
PER_NODE, BETWEEN = 4, Link(bytes_per_s=12.5e9, latency_s=5e-6)
# (preset, device, samples of a step for each device).
MODELS = (
    ("mmt", "v100-16gb", 4),
    ("dlrm", "v100-16gb", 32),
    ("candle-uno", "v100-16gb", 64),
    ("two-branch", "v100-16gb", 4),
)
PUBLISHED = ("pipedream", "piper", "equal-split")
LIMIT_S = 60.0
MANY, LEAST, BEST = 32, 1.25, 1.6
# GraphPipe's own orders: backwards stay whole.
WHOLE = GraphPipePlanner(orders=((CHAIN_SCHEDULE, "zero-0"),))
STUDIED = 1.2
BRANCHES, BRANCHED, GROWN = (2, 4, 8, 16), ("candle-uno", "v100-16gb", 16, 64 * 16), 2.0
IN_A_ROW = "stages in a row win"


def cluster_of(cluster: Cluster, devices: int) -> Cluster:
    """The same devices, four to a node."""
    (group,) = cluster.groups
    nodes = devices // PER_NODE
    links = {(group.name, group.name): BETWEEN} if nodes > 1 else {}
    return replace(cluster, groups=(replace(group, count=nodes, devices=PER_NODE),), links=links)


def problem(model: str, device: str, devices: int, batch: int, **pins: object) -> Problem:
    """The question to all planners."""
    made = problem_of(
        model=model,
        on=f"{PER_NODE}x{device}",
        global_batch=batch,
        pins=PartialLayout(sharding="zero-0", tp=1, **pins),  # type: ignore[arg-type]
    )
    return replace(made, job=replace(made.job, cluster=cluster_of(made.job.cluster, devices)))


def chains(planner: Planner, asked: Problem) -> Iterator[Candidate]:
    """The fitting plans whose stages are cuts of the layers in their order, without orders of graphs."""
    for one in planner.search(asked).fitting:
        assert one.plan is not None
        if one.layout is not None and not one.plan.schedule.name.startswith("graph"):
            yield one


def best_of(name: str, asked: Problem) -> Candidate | None:
    """What a planner answers; of weft, its best chain."""
    if name == "weft":
        return next(chains(PLANNERS[name], asked), None)
    return next(iter(PLANNERS[name].search(asked).fitting), None)


Question = tuple[str, str, int, int]


def swept(name: str, question: Question) -> float | None:
    """The shortest step of a baseline over pinned numbers of replicas, which the original would choose."""
    _, _, devices, batch = question
    found = [best_of(name, problem(*question, dp=dp)) for dp in divisors(devices) if batch % dp == 0]
    return min((one.step_s for one in found if one is not None), default=None)


def measure(report: Report, question: Question) -> None:
    """One model on so many devices: every planner, the ratios, and where the gain comes from."""
    model, device, devices, batch = question
    cell = f"{model}, batch {batch}, {devices} {device}"
    if not report.missing(cell):
        return
    asked, bests = problem(*question), dict[str, Candidate]()
    found: dict[str, Value] = {}
    for name in ("graphpipe", *PUBLISHED, "weft"):
        began = time.process_time()
        best = best_of(name, asked)
        searched_s = time.process_time() - began
        found[f"{name}, search"] = Value(searched_s, "s", LIMIT_S)
        if best is None or searched_s > LIMIT_S:
            report.say(f"{cell}: no plan of {name}")
            continue
        bests[name], found[name] = best, Value(best.step_s, "s")
        report.say(f"{cell}: {name}: {best.words}")
    graph_s = bests["graphpipe"].step_s
    found |= depths(asked, "graphpipe", bests["graphpipe"])
    published = [one for name, one in bests.items() if name in PUBLISHED]
    if published:
        least = min(published, key=lambda one: one.step_s)
        found["best published / graphpipe"] = over(least.step_s / graph_s, LEAST if devices == MANY else 1)
        found |= {**without_split(question, least), **depths(asked, "best published", least)}
    found["flattened"] = over(
        best_published(flattened(asked)).step_s / whole_s(asked), LEAST if devices == MANY else 1
    )
    pinned = [swept(name, question) for name in ("pipedream", "equal-split")]
    every = [*(one.step_s for one in published), *(one for one in pinned if one is not None)]
    found["with replicas swept"] = over(min(every) / graph_s, 1.0)
    if "weft" in bests:
        found["weft's chain / graphpipe"] = over(bests["weft"].step_s / graph_s, 1.0)
    report.add_cell(cell, found)


def flattened(asked: Problem) -> Problem:
    """The layers one after the other, each of which waits for the one before."""
    graph = asked.job.graph
    chain = replace(graph, edges=chain_edges(len(graph.layers)))
    return replace(asked, job=replace(asked.job, graph=chain))


def best_published(asked: Problem) -> Candidate:
    found = [best for name in PUBLISHED if (best := best_of(name, asked)) is not None]
    return min(found, key=lambda one: one.step_s)


def whole_s(asked: Problem) -> float:
    """The step of `graphpipe` with whole backwards."""
    return WHOLE.search(asked).fitting[0].step_s


def without_split(question: Question, published: Candidate) -> dict[str, Value]:
    """What `graphpipe` gains with whole backwards, and with the micro-batches of the best published plan."""
    assert published.plan is not None, "a fitting candidate was simulated"
    sized = problem(*question, micro_batch_size=published.plan.micro_batch_size)
    found: dict[str, Value] = {}
    for what, asked in (("whole backwards", problem(*question)), ("and its micro-batch size", sized)):
        best = next(iter(WHOLE.search(asked).fitting), None)
        if best is not None:
            found[what] = Value(published.step_s / best.step_s, "ratio")
        if best is not None and asked is sized:
            found["peak, graphpipe with its size"] = Value(peak_bytes(best), "bytes")
    return {**found, "peak, best published": Value(peak_bytes(published), "bytes")}


def peak_bytes(candidate: Candidate) -> int:
    assert candidate.prediction is not None, "a fitting candidate was simulated"
    return max(candidate.prediction.peak_bytes)


def depths(asked: Problem, name: str, candidate: Candidate) -> dict[str, Value]:
    """The stages of a plan, and those on their longest path."""
    assert candidate.plan is not None, "a fitting candidate was simulated"
    stages, longest = len(candidate.plan.stages), depth_of(candidate.plan, asked.job.graph)
    row = Value(int(longest == stages), "count")
    counts = {f"stages, {name}": Value(stages, "count"), f"longest path, {name}": Value(longest, "count")}
    return {**counts, IN_A_ROW: row} if name == "graphpipe" else counts


def study(report: Report) -> None:
    """GraphPipe's case study: two branches on eight devices, beside the flattened model, no replicas."""
    cell = "case study, no replicas"
    if not report.missing(cell):
        return
    asked = problem("two-branch", "v100-16gb", 8, 32, dp=1, pp=8)
    flat = flattened(asked)
    graph, chain, split = WHOLE.search(asked).fitting[0], best_published(flat), best_of("graphpipe", asked)
    found: dict[str, Value] = {}
    for run, name, one in ((asked, "graphpipe", graph), (flat, "flattened", chain)):
        assert one.plan is not None, "a fitting candidate was simulated"
        found[name], found[f"peak, {name}"] = Value(one.step_s, "s"), Value(peak_bytes(one), "bytes")
        found[f"samples, {name}"] = Value(one.plan.micro_batch_size, "count")
        found |= depths(run, name, one)
    assert split is not None, "it fits with whole backwards"
    found["gain"] = over(chain.step_s / graph.step_s, STUDIED)
    report.add_cell(cell, {**found, "gain with split backwards": over(chain.step_s / split.step_s, STUDIED)})


def grow(report: Report) -> None:
    """The gain over the best published plan where a model has more and more branches."""
    gains = []
    for branches in BRANCHES:
        cell = f"{branches} branches of {BRANCHED[0]}"
        if report.missing(cell):
            config = tower_config(
                cell,
                family="candle-uno",
                depth=4,
                features=(4096,) * branches,
                feed_forward=4096,
                joint_depth=4,
            )
            made = problem(*BRANCHED)
            asked = replace(made, job=replace(made.job, graph=layer_graph(config)))
            step_s, published_s = whole_s(asked), best_published(asked).step_s
            flat_s = best_published(flattened(asked)).step_s
            gains_of = {"gain": published_s / step_s, "gain over the flattened model": flat_s / step_s}
            ratios = {what: over(gain, 1.0) for what, gain in gains_of.items()}
            report.add_cell(cell, {"graphpipe, whole backwards": Value(step_s, "s"), **ratios})
        gains.append(report.values(cell)["gain over the flattened model"])
    report.add("largest gain of more branches", over(max(gains), GROWN))


def over(value: float, target: float) -> Value:
    """A ratio that should reach a target."""
    return Value(value, "ratio", target, met=value >= target * (1 - 1e-9))


def in_all(report: Report, devices: list[int]) -> None:
    """The largest gain on many devices, and the jobs in which stages in a row win."""
    rows, gains = 0, []
    for model, device, each in MODELS:
        for count in devices:
            known = report.values(f"{model}, batch {each * count}, {count} {device}")
            rows += round(known[IN_A_ROW])
            gains += [known["best published / graphpipe"]] if count == MANY else []
    if gains:
        report.add(f"largest gain on {MANY} devices", over(max(gains), BEST))
    report.add(f"jobs in which {IN_A_ROW}, of {len(MODELS) * len(devices)}", Value(rows, "count"))


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--devices", default=",".join(map(str, DEVICES)))
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("graph_planners", asked)
    report.print_machine()
    every = [int(word) for word in asked.devices.split(",")]
    for model, device, each in MODELS:
        for devices in every:
            measure(report, (model, device, devices, each * devices))
    in_all(report, every)
    study(report)
    grow(report)


if __name__ == "__main__":
    main()
