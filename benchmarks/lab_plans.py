"""Many plans of a small GPT on two emulated mixed clusters: predicted three ways, then measured.

Inside a lab (`weft lab`) of each cluster the layers are measured on both kinds of devices and the links
between the nodes, then every plan is predicted by weft's simulator, by AMP's formula and by the closed form
of Metis, all from the same measurements, and trained for a few steps. It needs root.

    python benchmarks/lab_plans.py
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from figures import Value
from harness import Report, parser

from weft.capture.mixed import measure_mixed
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan_file import PlanFile
from weft.errors import InputError
from weft.lab.lab import open_lab
from weft.lab.place import VARIABLE
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.planning.planners.amp.inputs import Degrees, amp_inputs
from weft.planning.planners.amp.planner import amp_strategy
from weft.planning.planners.metis_form import metis_form_s
from weft.planning.problem import Problem
from weft.predict.cost.placed_plan import CostModel
from weft.predict.measurements import load_devices
from weft.predict.predict import predict
from weft.run.launch.workers import launch_workers
from weft.scoring.metrics import Point, figures_of
from weft.signals import terminable

# So large that a pass lasts many of the quotas' periods of 5 ms: a shorter one is not slowed down evenly.
BLOCKS, SEQUENCE, GLOBAL_BATCH = 6, 256, 16
MICRO_BATCH_SIZES = (2, 4)
# AMP plans with the times of a single sample.
MEASURED_SIZES = (1, *MICRO_BATCH_SIZES)
# Machines have moods of some seconds: every plan has its turn several times.
TURNS, STEPS, WARM_UP_STEPS = 3, 4, 1
# What is said of each predictor; of the first two less is better.
WORDS = {
    "mape": "mean error",
    "regret": "regret",
    "spearman": "Spearman",
    "mape_scaled": "mean error without its common factor",
}


def _device(name: str, flops_per_s: float) -> Device:
    return Device(
        name=name,
        memory_bytes=2**31,
        memory_bytes_per_s=1e10,
        flops_per_s={"fp32": flops_per_s},
        launch_s=5e-6,
        synchronous=True,
    )


FAST, SLOW = _device("fast", 4e10), _device("slow", 2e10)
INSIDE = Link(1e9, 50e-6)


def _group(name: str, device: Device, nodes: int, devices: int) -> NodeGroup:
    return NodeGroup(name=name, count=nodes, device=device, devices=devices, link=INSIDE)


# Ranks 0 and 1 are fast, 2 and 3 slow, in both.
CLUSTERS = (
    Cluster(
        name="unequal speeds",
        groups=(_group("new", FAST, 1, 2), _group("old", SLOW, 1, 2)),
        links={("new", "old"): Link(2e8, 100e-6)},
    ),
    Cluster(
        name="unequal speeds and links",
        groups=(_group("new", FAST, 2, 1), _group("old", SLOW, 2, 1)),
        links={
            ("new", "new"): Link(1e8, 100e-6),
            ("new", "old"): Link(3e7, 100e-6),
            ("old", "old"): Link(1e7, 100e-6),
        },
    ),
)


def layouts() -> list[Layout]:
    """Pipelines over all ranks, pairs of replicas, and replicas alone; not all fit the speeds."""

    def layout(
        stages: int,
        size: int,
        layers: tuple[int, ...],
        order: tuple[int, ...] | None = None,
        shares: tuple[int, ...] | None = None,
    ) -> Layout:
        return Layout(
            pp=stages,
            dp=4 // stages,
            loops=1,
            micro_batch_size=size,
            schedule="1f1b",
            layers_per_stage=layers,
            rank_order=order,
            micro_batches_per_replica=shares,
        )

    small, large = MICRO_BATCH_SIZES
    return [
        *(layout(4, size, layers) for size in (small, large) for layers in ((2, 2, 2, 2), (3, 2, 1, 2))),
        layout(4, small, (2, 2, 2, 2), (2, 3, 0, 1)),
        layout(4, small, (2, 1, 2, 3), (2, 3, 0, 1)),
        layout(4, small, (2, 2, 2, 2), (0, 2, 1, 3)),
        layout(4, small, (3, 1, 2, 2), (0, 2, 1, 3)),
        *(layout(2, small, layers) for layers in ((4, 4), (5, 3), (6, 2))),
        *(layout(2, large, layers) for layers in ((4, 4), (5, 3))),
        *(layout(2, size, (4, 4), (0, 2, 1, 3)) for size in (small, large)),
        layout(2, small, (4, 4), (0, 2, 1, 3), (5, 3)),
        layout(2, large, (4, 4), (0, 2, 1, 3), (3, 1)),
        *(layout(1, size, (8,)) for size in (small, large)),
        layout(1, small, (8,), None, (3, 3, 1, 1)),
    ]


def model() -> ModelConfig:
    return replace(resolve_model("gpt-1m", sequence=SEQUENCE), layers=BLOCKS)


def problem_on(cluster: Cluster, config: ModelConfig, home: Path) -> Problem:
    """With what was measured inside the lab."""
    graph = layer_graph(config)
    job = Job(graph=graph, cluster=cluster, global_batch=GLOBAL_BATCH, sequence=SEQUENCE, precision="fp32")
    return Problem(job=job, model=config, measurements=load_devices(job, home))


def amp_s(problem: Problem, layout: Layout) -> float:
    """AMP's estimate of a layout's own stages and devices; unequal shares are nothing it knows."""
    micro_batches = GLOBAL_BATCH // (layout.dp * layout.micro_batch_size)
    degrees = Degrees(1, layout.dp, layout.pp, layout.micro_batch_size, micro_batches)
    inputs = amp_inputs(problem, [1])
    nodes = inputs.node_of_rank[list(layout.rank_order or range(4))]
    strategy = amp_strategy(inputs, degrees, nodes, layout.layers_per_stage)
    assert strategy is not None, "every stage has a block"
    return strategy.seconds


def predictions_of(problem: Problem, layout: Layout) -> Mapping[str, Point]:
    """Seconds of a step by each predictor; none is measured yet."""
    job = problem.job
    plan = build_plan(job, layout, flops_per_layer(job))
    found = predict(
        CostModel(graph=job.graph, cluster=job.cluster, profile=problem.measurements.profile),
        plan,
        compile_plan(plan, job.graph),
    )
    step = found.prediction
    seconds = {"amp": amp_s(problem, layout), "metis": metis_form_s(problem, layout)}
    points = {
        name: Point(measured_s=None, predicted_s=s, low_s=s, high_s=s, fits=True)
        for name, s in seconds.items()
    }
    ours = Point(
        measured_s=None, predicted_s=step.step_s, low_s=step.step_low_s, high_s=step.step_high_s, fits=True
    )
    return {"weft": ours, **points}


def measured_on(cluster: Cluster, home: Path) -> tuple[list[Mapping[str, Point]], list[float]]:
    """Predictions and measured seconds of all plans, inside a lab of the cluster."""
    config = model()
    with (
        terminable(),
        open_lab(cluster) as lab,
        tempfile.TemporaryDirectory(prefix="weft-lab-plans-") as name,
    ):
        os.environ |= lab.launcher_environment()
        try:
            found = measure_mixed(
                cluster, config, precision="fp32", micro_batch_sizes=MEASURED_SIZES, home=home
            )
            problem = problem_on(found.cluster, config, home)
            folder = Path(name)
            for index, layout in enumerate(layouts()):
                plan = build_plan(problem.job, layout, flops_per_layer(problem.job))
                (folder / f"plan-{index:02d}.json").write_text(PlanFile(plan).to_json())
            predicted = [predictions_of(problem, layout) for layout in layouts()]
            launch_workers(folder, cluster.ranks, "lab_plans_worker")
            return predicted, json.loads((folder / "measured.json").read_text())
        finally:
            del os.environ[VARIABLE]


def report_cluster(
    report: Report, cluster: Cluster, predicted: Sequence[Mapping[str, Point]], measured: Sequence[float]
) -> None:
    """A line per plan, and the figures of each predictor.

    Target: weft is first, or shares the first place, in error, ranking and regret.
    """
    report.say(f"{cluster.name}: {len(measured)} plans")
    for layout, points, seconds in zip(layouts(), predicted, measured, strict=True):
        shown = "  ".join(
            f"{name} {point.predicted_s * 1e3:5.0f} ({point.predicted_s / seconds - 1:+4.0%})"
            for name, point in points.items()
        )
        report.say(f"  measured {seconds * 1e3:5.0f} ms  {shown}  {layout}")
    figures = {
        name: figures_of(
            [
                replace(points[name], measured_s=seconds)
                for points, seconds in zip(predicted, measured, strict=True)
            ]
        )
        for name in predicted[0]
    }
    least, most = (
        {word: choose(getattr(one, word) for one in figures.values()) for word in WORDS}
        for choose in (min, max)
    )
    first = most | {word: least[word] for word in ("mape", "regret")}
    report.add_cell(
        cluster.name,
        {
            f"{words}, {name}": Value(
                value := float(getattr(one, word)),
                "ratio" if word == "spearman" else "share",
                met=math.isclose(value, first[word], abs_tol=1e-12)
                if name == "weft" and word != "mape_scaled"
                else None,
            )
            for name, one in figures.items()
            for word, words in WORDS.items()
        },
    )


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> int:
    report = Report("lab_plans", options().parse_args())
    report.print_machine()
    report.say(f"model: gpt-1m with {BLOCKS} blocks, {SEQUENCE} tokens, {GLOBAL_BATCH} samples per step")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for cluster in CLUSTERS:
        if not report.missing(cluster.name):
            continue
        with tempfile.TemporaryDirectory(prefix="weft-lab-home-") as home:
            try:
                predicted, measured = measured_on(cluster, Path(home))
            except InputError as error:
                report.say(f"skipped: {error}")
                return 0
        report_cluster(report, cluster, predicted, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
