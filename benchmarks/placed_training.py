"""Does a model larger than each device train where it is placed, and what does pipelining gain there?

Three processes stand for hosts with unlike memories, of which none holds the model. A trunk forks into two
towers of unlike length, which join. Placed alone, the whole batch is one micro-batch, so most hosts wait.
Then micro-batches flow over a placement. Both plans come from `baechi`, and train for real. The plan placed
alone also trains in one process, which counts the tensors of each host and refuses more than its limit.

    python benchmarks/placed_training.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from figures import Value
from harness import Report, parser
from torch import nn

from weft import BlockModel
from weft.describe.plan import Plan
from weft.describe.plan_file import load_plan
from weft.predict.cost.memory import plan_states
from weft.run.placed_model import PlacedDevice, PlacedModel
from weft.timeline.figures import prediction_error

WIDTH, FEATURES, CLASSES = 768, 64, 10
TRUNK, TOWERS = 4, (3, 2)
GLOBAL_BATCH, STEPS = 768, 12
TARGET = 0.1
ALONE, PIPELINED = "placed alone", "pipelined over the places"
# In bytes; each block holds 75 MB in states.
LIMITS = (230e6, 420e6, 320e6)


class Block(nn.Module):
    """Two products with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.down(torch.relu(self.up(values)))
        return values + product


class Join(nn.Module):
    """The classes of all towers' ends together."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(len(TOWERS) * WIDTH, CLASSES)

    def forward(self, *ends: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classes(torch.cat(ends, dim=1))
        return logits


def stem() -> nn.Module:
    """From an image of 8 x 8 to features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, WIDTH))


def forked() -> BlockModel:
    """The trunk, the towers and what joins them."""
    count = TRUNK + sum(TOWERS)
    edges, ends, last = [(one, one + 1) for one in range(TRUNK)], [], TRUNK
    for depth in TOWERS:
        edges += [(TRUNK, last + 1), *((one, one + 1) for one in range(last + 1, last + depth))]
        last += depth
        ends.append(last)
    edges += [(end, count + 1) for end in ends]
    layers = [stem, *[Block] * count, Join]
    return BlockModel(layers, edges=edges, example=torch.zeros(1, 1, 8, 8), classes=CLASSES)


def cluster_text() -> str:
    """Three hosts that differ in memory."""
    parts = ['name = "unlike-hosts"']
    for number, limit in enumerate(LIMITS):
        parts += [
            f'[[node]]\nname = "host{number}"\ndevice = "kind{number}"\ndevices = 1',
            'bandwidth = "2 GB/s"\nlatency = "60 us"',
            f'[device.kind{number}]\nmemory = "{limit:.0f} B"\nreserve = "1 MB"\nsynchronous = true',
            'memory_bandwidth = "10 GB/s"\nflops = { fp32 = "50 GFLOP/s" }\nlaunch = "10 us"',
        ]
    for here, there in combinations(range(len(LIMITS)), 2):
        parts.append(
            f'[[link]]\nbetween = ["host{here}", "host{there}"]\nbandwidth = "2 GB/s"\nlatency = "60 us"'
        )
    return "\n".join(parts)


def run_text(micro_batch_size: int | None) -> str:
    """A run file with one size of micro-batches, or with the best one."""
    pinned = "" if micro_batch_size is None else f"micro_batch_size = {micro_batch_size}"
    return f"""
[model]
build = "placed_training:forked"
[task]
kind = "image-classification"
[cluster]
use = "cluster.toml"
[train]
global_batch = {GLOBAL_BATCH}
steps = {STEPS}
precision = "fp32"
[plan]
planner = "baechi"
dp = 1
{pinned}
"""


def trained(micro_batch_size: int | None) -> tuple[Plan, dict[str, Any]]:
    """Train in processes of their own; the plan, and the summary of the run."""
    with tempfile.TemporaryDirectory(prefix="weft-placed-") as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(cluster_text(), encoding="utf-8")
        (folder / "run.toml").write_text(run_text(micro_batch_size), encoding="utf-8")
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "WEFT_HOME": str(folder / "home")}
        command = [sys.executable, "-m", "weft", "train", "run.toml", "--directory", "run"]
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
        return load_plan(folder / "run" / "plan.json"), summary


def measure_steps(report: Report, cell: str, micro_batch_size: int | None) -> tuple[Plan, dict[str, Any]]:
    """A plan's stages and size of micro-batches, and its steps; the plan and the run's summary."""
    plan, summary = trained(micro_batch_size)
    report.add_cell(
        cell,
        {
            "micro-batches": Value(plan.micro_batches, "count"),
            "stages": Value(len(plan.stages), "count"),
            "predicted step": Value(summary["predicted_step_s"], "s"),
            "step": Value(summary["measured_step_s"], "s"),
        },
    )
    return plan, summary


def measure_memory(report: Report, plan: Plan, summary: dict[str, Any]) -> None:
    """Each host's limit, predicted and counted bytes where one process trains the model placed alone."""
    hosts = [PlacedDevice(torch.device("cpu"), int(limit)) for limit in LIMITS]
    model = PlacedModel(forked(), plan, hosts)
    optimizer, random = torch.optim.AdamW(model.parameters()), torch.Generator().manual_seed(0)
    for _ in range(2):
        images = torch.rand(GLOBAL_BATCH, 1, 8, 8, generator=random)
        labels = torch.randint(CLASSES, (GLOBAL_BATCH,), generator=random)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for host, limit in enumerate(LIMITS):
        predicted, counted = summary["predicted_peak_bytes"][host], model.peak_bytes[host]
        error = prediction_error(predicted, counted)
        report.add_cell(
            f"memory of host {host}",
            {
                "limit": Value(limit / 1e6, "MB"),
                "predicted": Value(predicted / 1e6, "MB"),
                "counted": Value(counted / 1e6, "MB"),
                "error": Value(error, "share", TARGET, met=abs(error) <= TARGET),
            },
        )
    report.add("states of the whole model over the largest limit", Value(needed(plan) / max(LIMITS), "ratio"))


def needed(plan: Plan) -> float:
    """The bytes of all states together."""
    shape = plan.shape(0)
    return plan_states(plan).total * sum(forked().layer_graph().amounts("parameters", shape))


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> int:
    report = Report("placed_training", options().parse_args())
    report.print_machine()
    alone = measure_steps(report, ALONE, GLOBAL_BATCH)
    measure_steps(report, PIPELINED, None)
    measure_memory(report, *alone)
    for name in ("predicted step", "step"):
        gain = report.value(f"{ALONE}: {name}") / report.value(f"{PIPELINED}: {name}")
        report.add(f"{name}, placed alone over pipelined", Value(gain, "ratio"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
