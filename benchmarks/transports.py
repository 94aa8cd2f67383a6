"""The two transports beside each other, and the host's time for an instruction that computes nothing.

A model trains on two ranks, on `host` (TCP, gloo in rank order) and `device` (gloo where tensors are).
Blocks of steps alternate between both. The ratio of their times has a bootstrap interval over the blocks.

An empty instruction belongs to a stage of one number, on one rank. Its time is that of a step without the
time of the same passes in a plain loop, divided by the number of passes. torch's pipelining is measured so,
too. On a machine with two GPUs all of it runs there, and `device` is NCCL.

    python benchmarks/transports.py [--model MODEL] [--sequence N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from beside import Floats, ratio_of, side_by_side
from executor_vs_torch import Case, descent, loss_of, weft_plan, weft_program
from figures import Value
from harness import Report, launch, parser_of_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import weft
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.planning.compile import compile_part
from weft.program.rank_program import part_of
from weft.run.launch.worker_start import WorkerContext, start_worker
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages

RANKS, SEED = 2, 5
MICRO_BATCH_SIZE, GLOBAL_BATCH = 2, 16
PLANS: Mapping[str, Mapping[str, Any]] = {
    "pp 2, 1f1b": {"pp": 2, "schedule": "1f1b"},
    "pp 2, breadth-first, 2 loops": {"pp": 2, "loops": 2, "schedule": "breadth-first"},
    "dp 2": {"dp": 2},
    "dp 2, zero-3": {"dp": 2, "sharding": "zero-3"},
    "tp 2": {"tp": 2},
}
EMPTY_MICRO_BATCHES, EMPTY_STEPS, EMPTY_BLOCKS = 64, 20, 15
EMPTY_TARGET = 0.5


def plan_of(asked: argparse.Namespace, pins: Mapping[str, Any]) -> Plan:
    degrees = {axis: pins.get(axis, 1) for axis in ("pp", "dp", "tp")}
    return weft.plan(
        model=asked.model,
        on="this-machine",
        global_batch=GLOBAL_BATCH,
        sequence=asked.sequence,
        precision="fp32",
        micro_batch_size=MICRO_BATCH_SIZE,
        **{**pins, **degrees},
    ).plan


def compare(
    report: Report, asked: argparse.Namespace, name: str, context: WorkerContext, number: int
) -> None:
    """Train one plan over both transports."""
    config, plan = resolve_model(asked.model, sequence=asked.sequence), plan_of(asked, PLANS[name])
    rank = context.rank
    tokens = torch.randint(
        config.vocabulary,
        (MICRO_BATCH_SIZE, asked.sequence + 1),
        generator=torch.Generator().manual_seed(SEED),
    )
    samples = tokens[:, :-1], tokens[:, 1:]
    runtimes: list[RankRuntime] = []

    def trainer(transport: str) -> Callable[[int], float]:
        stages = build_stages(plan, config, rank, SEED, torch.float32)
        runtime = RankRuntime(
            plan,
            compile_part(plan, layer_graph(config), rank),
            {stage: module.to(context.device) for stage, module in stages.items()},
            lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            descent,
            device=context.device,
            seed=SEED,
            transport=transport,
            generation=2 * number + len(runtimes),
        )
        runtimes.append(runtime)
        done = 0

        def train(steps: int) -> float:
            nonlocal done
            results = [runtime.step(step, lambda micro_batch: samples) for step in range(done, done + steps)]
            done += steps
            return results[-1].loss

        return train

    times = side_by_side(trainer("device"), trainer("host"))
    for runtime in runtimes:
        runtime.close()
    if rank == 0:
        report.add_cell(name, transport_figures(times))


def transport_figures(times: Floats) -> dict[str, Value]:
    found = ratio_of(times, target=0.0)
    ratio = found["ratio"]
    return {
        "device": found["weft"],
        "host": found["torch"],
        "device / host": Value(ratio.value, "ratio", low=ratio.low, high=ratio.high),
    }


class Number(nn.Module):
    """A stage that multiplies by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, 1)

    output_shape = input_shape


def empty_instructions(report: Report, number: int) -> None:
    """The host's time for an instruction of each, beyond that of the passes."""
    inputs, targets = torch.randn(2, EMPTY_MICRO_BATCHES, 1, generator=torch.Generator().manual_seed(SEED))
    ways = {
        "passes": passes_alone(inputs, targets),
        "weft": weft_alone(inputs, targets, number),
        "torch": torch_alone(inputs, targets),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(EMPTY_BLOCKS + 1):
        for name, step in ways.items():
            began = time.perf_counter()
            for _ in range(EMPTY_STEPS):
                step()
            if block:
                times[name].append((time.perf_counter() - began) / EMPTY_STEPS)
    passes = times.pop("passes")
    own = {
        name: [(one - bare) / (2 * EMPTY_MICRO_BATCHES) for one, bare in zip(steps, passes, strict=True)]
        for name, steps in times.items()
    }
    ratio = statistics.median(ours / theirs for ours, theirs in zip(own["weft"], own["torch"], strict=True))
    report.add_cell(
        "empty instruction",
        {
            **{name: Value(statistics.median(found), "s") for name, found in own.items()},
            "weft / torch": Value(ratio, "ratio", EMPTY_TARGET),
        },
    )


def passes_alone(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    module = Number()
    optimizer = descent(module)

    def step() -> None:
        for micro_batch, target in zip(inputs.split(1), targets.split(1), strict=True):
            (loss_of(module(micro_batch), target) / EMPTY_MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def weft_alone(inputs: torch.Tensor, targets: torch.Tensor, number: int) -> Callable[[], object]:
    case = Case("empty", "gpipe", 1, 1, 1, 1, EMPTY_TARGET)
    plan = weft_plan(case, 1, EMPTY_MICRO_BATCHES)
    program = part_of(weft_program(case, 1, EMPTY_MICRO_BATCHES), 0)
    runtime = RankRuntime(
        plan, program, {0: Number()}, loss_of, descent, device="cpu", seed=SEED, generation=number
    )
    parts = list(zip(inputs.split(1), targets.split(1), strict=True))
    return lambda: runtime.step(0, parts.__getitem__).loss


def torch_alone(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    module = Number()
    stage, optimizer = PipelineStage(module, 0, 1, torch.device("cpu")), descent(module)
    schedule = ScheduleGPipe(stage, n_microbatches=EMPTY_MICRO_BATCHES, loss_fn=loss_of)

    def step() -> None:
        losses: list[torch.Tensor] = []
        schedule.step(inputs, target=targets, losses=losses)
        torch.stack(losses).mean().item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(report: Report, asked: argparse.Namespace) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    if dist.get_world_size() == 1:
        empty_instructions(report, 0)
    else:
        for number, name in enumerate(PLANS):
            if report.missing(name):
                compare(report, asked, name, context, number)
    context.close()


def options() -> argparse.ArgumentParser:
    made = parser_of_ranks(__doc__)
    made.add_argument("--model", default="gpt-1m")
    made.add_argument("--sequence", type=int, default=64)
    return made


def main() -> int:
    asked = options().parse_args()
    report = Report("transports", asked)
    if asked.worker:
        worker(report, asked)
        return 0
    report.print_machine()
    if torch.cuda.device_count() == 1:
        report.say("one GPU: NCCL needs one for each rank, so nothing was compared")
        return 0
    words = ("--model", asked.model, "--sequence", str(asked.sequence))
    codes = [launch(__file__, RANKS, asked, *words)]
    if report.missing("empty instruction"):
        codes.append(launch(__file__, 1, asked, *words))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
