"""Tensor collectives inside computations, between segments of them, and beside gradients of weights.

Two ranks train one model in all three ways, step by step in turns, in the same processes. Before that each
way's step is predicted: from data sheets, from this machine's measured speeds, and from its layers as two
tensor ranks run them. Medians; the ratio to `inside` is that of neighbouring steps.

    python benchmarks/tensor_collectives.py [MODEL] [--micro-batch-size N] [--unmeasured]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser

import weft
from weft.capture.measure import measure
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan_file import load_plan
from weft.methods.tensor_collectives.program import WAYS
from weft.planning.compile import compile_part
from weft.run.launch.worker_start import start_worker
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.record.recorder import Recorder
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.workspace import Batch

RANKS, MICRO_BATCHES, WARM_UP = 2, 4, 4
SEED = 3

RUN = """
[model]
preset = "{model}"
[task]
sequence = {sequence}
[train]
global_batch = {global_batch}
steps = 1
precision = "fp32"
[cluster]
use = "this-machine"
[plan]
pp = 1
dp = 1
tp = {ranks}
micro_batch_size = {micro_batch_size}
schedule = "1f1b"
sharding = "zero-0"
[tensor-collectives]
run = "{way}"
"""


class DividedLoss:
    """Mean cross entropy of shares of the logits."""

    takes_divided_logits = True

    def __call__(self, logits: DividedLogits, targets: torch.Tensor) -> torch.Tensor:
        return logits.cross_entropy(targets)


def homes_of(asked: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """By level of knowledge, a home that has the measurements of it."""
    homes = {"data sheet": folder / "data sheet"}
    if asked.unmeasured:
        return homes
    homes |= {name: folder / name for name in ("machine", "layers")}
    config = resolve_model(asked.model, sequence=asked.sequence)
    sizes = (asked.micro_batch_size,)
    found = measure(config, tensor_degrees=(1, RANKS), micro_batch_sizes=sizes, home=homes["layers"])
    machine = found.files[0]
    copy = homes["machine"] / machine.relative_to(homes["layers"])
    copy.parent.mkdir(parents=True)
    shutil.copy(machine, copy)
    return homes


def predictions(asked: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """By way and level of knowledge the predicted step; leaves a plan of each way in the folder."""
    found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for level, home in homes_of(asked, folder).items():
        os.environ["WEFT_HOME"] = str(home)
        for way in WAYS:
            text = RUN.format(
                model=asked.model,
                sequence=asked.sequence,
                global_batch=MICRO_BATCHES * asked.micro_batch_size,
                micro_batch_size=asked.micro_batch_size,
                ranks=RANKS,
                way=way,
            )
            (folder / "run.toml").write_text(text)
            planned = weft.plan(folder / "run.toml")
            planned.save(folder / f"{way}.json")
            found[way][level] = planned.job.predicted.prediction.step_s
    return found


def runtime_of(
    way: str, config: ModelConfig, folder: Path, rank: int, number: int, steps: int
) -> RankRuntime:
    plan = load_plan(folder / f"{way}.json")
    program = compile_part(plan, layer_graph(config), rank)
    recorded = folder / way
    recorded.mkdir(exist_ok=True)
    return RankRuntime(
        plan,
        program,
        build_stages(plan, config, rank, SEED, torch.float32),
        DividedLoss(),
        lambda stage: torch.optim.AdamW(stage.parameters(), lr=1e-3, foreach=True),
        device="cpu",
        seed=SEED,
        generation=number,
        recorder=Recorder(recorded, program=program, plan_id=plan.plan_id, steps=steps),
    )


def batch_of(config: ModelConfig, asked: argparse.Namespace) -> Batch:
    shape = (asked.micro_batch_size, asked.sequence + 1)
    tokens = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
    return lambda number: (tokens[:, :-1], tokens[:, 1:])


def work(asked: argparse.Namespace) -> None:
    """One rank; the first leaves the seconds of all steps in the folder."""
    context, folder = start_worker(), Path(asked.worker)
    torch.set_num_threads(1)
    config = resolve_model(asked.model, sequence=asked.sequence)
    steps = asked.steps + WARM_UP
    runtimes = {
        way: runtime_of(way, config, folder, context.rank, number, steps) for number, way in enumerate(WAYS)
    }
    batch, times = batch_of(config, asked), {way: [0.0] * steps for way in WAYS}
    losses = dict.fromkeys(WAYS, 0.0)
    for step in range(steps):
        turn = step % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            dist.barrier()
            began = time.perf_counter()
            losses[way] = runtimes[way].step(step, batch).loss
            dist.barrier()
            times[way][step] = time.perf_counter() - began
    if max(losses.values()) - min(losses.values()) > 1e-5:
        raise SystemExit(f"the ways do not compute the same: losses {losses}")
    if context.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    for runtime in runtimes.values():
        runtime.close()
    context.close()


def measured(asked: argparse.Namespace, folder: Path) -> Mapping[str, list[float]]:
    """By way the seconds of each step after those that warm up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    words = [
        asked.model,
        *("--micro-batch-size", str(asked.micro_batch_size), "--sequence", str(asked.sequence)),
        *("--steps", str(asked.steps), "--worker", str(folder)),
    ]
    subprocess.run([*command, __file__, *words], check=True)
    times: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
    return {way: one[WARM_UP:] for way, one in times.items()}


def figures_of(
    predicted: Mapping[str, Mapping[str, float]], times: Mapping[str, list[float]], way: str
) -> dict[str, Value]:
    """The step of one way, its ratio to `inside`, and each prediction with its error."""
    step_s = statistics.median(times[way])
    ratios = [one / inside for one, inside in zip(times[way], times["inside"], strict=True)]
    found = {"step": Value(step_s, "s"), "of inside": Value(statistics.median(ratios), "ratio")}
    for level, seconds in predicted[way].items():
        found[f"predicted from {level}"] = Value(seconds, "s")
        found[f"error from {level}"] = Value(seconds / step_s - 1.0, "share")
    return found


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", default="gpt-1m")
    made.add_argument("--micro-batch-size", type=int, default=4)
    made.add_argument("--sequence", type=int, default=128)
    made.add_argument("--steps", type=int, default=30)
    made.add_argument("--unmeasured", action="store_true", help="predict from data sheets alone")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def main() -> None:
    asked = options().parse_args()
    if asked.worker is not None:
        work(asked)
        return
    report = Report("tensor_collectives", asked)
    report.print_machine()
    shape = f"{MICRO_BATCHES} micro-batches of {asked.micro_batch_size} x {asked.sequence} tokens"
    work_done = f"{asked.steps} steps{', not measured before' if asked.unmeasured else ''}"
    cells = {way: f"{asked.model}, {shape}, {work_done}, {way}" for way in WAYS}
    # All ways take turns, so that they are measured together or not at all.
    if not any(report.missing(cell) for cell in cells.values()):
        return
    with tempfile.TemporaryDirectory(prefix="weft-tensor-collectives-") as name:
        folder = Path(name)
        predicted, times = predictions(asked, folder), measured(asked, folder)
    for way, cell in cells.items():
        report.add_cell(cell, figures_of(predicted, times, way))


if __name__ == "__main__":
    main()
