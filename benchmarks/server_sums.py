"""Sums of gradients on replicas and on servers, over links of 100 Mbit/s: predicted, then measured.

A lab (`weft lab`) has four workers and four hosts for servers, a node each. Layers and links are measured in
it first. Then every way to add up the gradients of a small GPT is predicted from these measurements, and
trained for a few steps, way after way in several turns. It needs root.

    python benchmarks/server_sums.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from figures import Value
from harness import Report, parser
from lab_plans import INSIDE, _device

from weft.capture.mixed import measure_mixed
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile
from weft.errors import InputError
from weft.lab.lab import open_lab
from weft.lab.place import VARIABLE
from weft.methods.clan.options import NAME
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.planning.problem import Problem
from weft.predict.measurements import load_devices
from weft.predict.predict import predict
from weft.run.launch.workers import launch_workers
from weft.signals import terminable

WORKERS, HOSTS, SEQUENCE = 4, 4, 32
TURNS = 1
LINK = Link(1.25e7, 100e-6)
TARGET = 0.10
WORKER_MODULE = "server_sums_worker"


@dataclass(frozen=True)
class Way:
    """A way to add gradients up: dense, or with a codec, on replicas or on so many servers."""

    codec: str = ""
    servers: int = 0

    @property
    def name(self) -> str:
        if not self.codec:
            return "dense"
        return f"{self.codec}, {f'{self.servers} servers' if self.servers else 'replicas'}"

    def problem(self, cluster: Cluster, home: Path) -> Problem:
        """With the measurements of the lab."""
        options: dict[str, Any] = (
            {"codec": self.codec, "servers": self.servers, "piece_bytes": 500_000} if self.codec else {}
        )
        config = model()
        job = Job(
            graph=layer_graph(config),
            cluster=cluster,
            global_batch=WORKERS,
            sequence=SEQUENCE,
            precision="fp32",
            sync_options=options,
        )
        return Problem(job=job, model=config, measurements=load_devices(job, home))

    def plan(self, job: Job) -> Plan:
        layout = Layout(
            pp=1,
            dp=WORKERS,
            loops=1,
            micro_batch_size=1,
            schedule="1f1b",
            sync=NAME if self.codec else "dense",
        )
        return build_plan(job, layout, flops_per_layer(job))


WAYS = (
    Way(),
    *(Way(codec, servers) for codec in ("fp32", "linear-dithering") for servers in (0, 2, HOSTS)),
)


def model() -> ModelConfig:
    return resolve_model("gpt-1m", sequence=SEQUENCE)


def described() -> Cluster:
    core = _device("core", 4e10)
    groups = [
        NodeGroup(name=name, count=count, device=core, devices=1, link=INSIDE)
        for name, count in (("worker", WORKERS), ("host", HOSTS))
    ]
    pairs = [("worker", "worker"), ("host", "worker"), ("host", "host")]
    return Cluster(name="workers and servers", groups=tuple(groups), links=dict.fromkeys(pairs, LINK))


def measured_s(plan: Plan) -> list[float]:
    """Seconds of the steps of one run."""
    with tempfile.TemporaryDirectory(prefix="weft-servers-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(PlanFile(plan).to_json())
        launch_workers(folder, plan.ranks, WORKER_MODULE)
        found: list[float] = json.loads((folder / "measured.json").read_text())
        return found


def measure(report: Report, home: Path) -> None:
    """Every way inside a lab: a line of what is predicted and measured."""
    cluster, steps = described(), dict[Way, list[float]]()
    with terminable(), open_lab(cluster) as lab:
        os.environ |= lab.launcher_environment()
        try:
            found = measure_mixed(
                cluster, model(), precision="fp32", micro_batch_sizes=(1,), home=home
            ).cluster
            problems = {way: way.problem(found, home) for way in WAYS}
            plans = {way: way.plan(problems[way].job) for way in WAYS}
            for _ in range(TURNS):
                for way, plan in plans.items():
                    steps.setdefault(way, []).extend(measured_s(plan))
                    report.say(f"{way.name}: {statistics.median(steps[way]) * 1e3:.0f} ms")
        finally:
            del os.environ[VARIABLE]
    medians = {way: statistics.median(seconds) for way, seconds in steps.items()}
    for way, plan in plans.items():
        step = predict(problems[way].cost_model, plan, compile_plan(plan, problems[way].job.graph)).prediction
        error = step.step_s / medians[way] - 1
        among = replace(way, servers=0)
        report.add_cell(
            way.name,
            {
                "step": Value(medians[way], "s"),
                "predicted": Value(step.step_s, "s"),
                "error": Value(error, "share", TARGET, met=abs(error) <= TARGET),
                "replicas / servers": Value(medians[among] / medians[way], "ratio"),
                "memory of the fullest server": Value(max(step.peak_bytes[WORKERS:], default=0), "bytes"),
            },
        )


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> int:
    report = Report("server_sums", options().parse_args())
    report.print_machine()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if not report.missing(WAYS[0].name):
        return 0
    with tempfile.TemporaryDirectory(prefix="weft-servers-home-") as home:
        try:
            measure(report, Path(home))
        except InputError as error:
            report.say(f"skipped: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
