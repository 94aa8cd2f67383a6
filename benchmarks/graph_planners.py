"""Plans of stages that form a graph, beside those of PipeDream, Piper, equal stages and weft's own chains.

    python benchmarks/graph_planners.py [--devices 8,32]

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
from weft.describe.layout import PartialLayout
from weft.planning.planners import PLANNERS, Candidate, Planner
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
    asked, steps, sizes = problem(*question), dict[str, float](), dict[str, int]()
    found: dict[str, Value] = {}
    for name in ("graphpipe", *PUBLISHED, "weft"):
        began = time.process_time()
        best = best_of(name, asked)
        searched_s = time.process_time() - began
        found[f"{name}, search"] = Value(searched_s, "s", LIMIT_S)
        if best is None or searched_s > LIMIT_S:
            report.say(f"{cell}: no plan of {name}")
            continue
        assert best.plan is not None, "a fitting candidate was simulated"
        steps[name], sizes[name] = best.step_s, best.plan.micro_batch_size
        found[name] = Value(best.step_s, "s")
        report.say(f"{cell}: {name}: {best.words}")
    graph_s = steps["graphpipe"]
    published = {name: step_s for name, step_s in steps.items() if name in PUBLISHED}
    if published:
        name = min(published, key=published.__getitem__)
        found["best published / graphpipe"] = over(published[name] / graph_s, LEAST if devices == MANY else 1)
        found["at its micro-batch size"] = Value(published[name] / alike_s(question, sizes[name]), "ratio")
    pinned = [swept(name, question) for name in ("pipedream", "equal-split")]
    every = [*published.values(), *(one for one in pinned if one is not None)]
    found["with replicas swept"] = over(min(every) / graph_s, 1.0)
    if "weft" in steps:
        found["weft's chain / graphpipe"] = Value(steps["weft"] / graph_s, "ratio")
    report.add_cell(cell, found)


def over(value: float, target: float) -> Value:
    """A ratio that should reach a target."""
    return Value(value, "ratio", target, met=value >= target * (1 - 1e-9))


def alike_s(question: Question, size: int) -> float:
    """The step of `graphpipe` with micro-batches of this size: what stages side by side gain alone."""
    best = best_of("graphpipe", problem(*question, micro_batch_size=size))
    return float("inf") if best is None else best.step_s


def best_gain(report: Report) -> None:
    """The largest gain on many devices."""
    ratios = [
        value
        for name in (f"{model}, batch {each * MANY}, {MANY} {device}" for model, device, each in MODELS)
        for what, value in report.values(name).items()
        if what == "best published / graphpipe"
    ]
    if ratios:
        report.add(f"largest gain on {MANY} devices", over(max(ratios), BEST))


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--devices", default=",".join(map(str, DEVICES)))
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("graph_planners", asked)
    report.print_machine()
    for model, device, each in MODELS:
        for devices in map(int, asked.devices.split(",")):
            measure(report, (model, device, devices, each * devices))
    best_gain(report)


if __name__ == "__main__":
    main()
