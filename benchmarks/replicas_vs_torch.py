"""Replicas against torch's: zero-0 beside DistributedDataParallel, zero-3 beside FSDP2 in a plain loop.

Two ranks train the same layers on the same samples, several micro-batches to a step, with an SGD step at its
end. DDP reduces in the last micro-batch's backward pass only (`no_sync` before). FSDP2 shards every layer and
runs as its tutorial does: it gathers and reduces for every micro-batch; `kept` lets it reduce in the last one
only and keep gathered weights from backward to forward, which costs it the memory that it saves.
weft runs the same layers as stages of one device, breadth-first: all micro-batches of a stage, then the next;
one layer is a stage, and beside DDP, which reduces small layers in one bucket, also all layers together.

    python benchmarks/replicas_vs_torch.py            # 2 ranks
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from beside import ALL_STEPS, SEED, WORK, Trainer, ratio_of, side_by_side
from harness import Report, launch, parser_of_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from weft.describe.plan import Choice, Plan, Replica, Sharding, Stage
from weft.methods.sharding.program import NAME as SHARDING
from weft.methods.sharding.program import Shared
from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.run.launch.worker_start import start_worker
from weft.run.record.recorder import Recorder
from weft.run.runtime import RankRuntime

RANKS, LAYERS, MICRO_BATCHES = 2, 4, 4
LEARNING_RATE = 1e-3
# Ours over theirs, at most.
TARGET = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    size: str
    width: int
    samples: int
    peer: str
    stages: int

    @property
    def sharding(self) -> Sharding:
        return "zero-0" if self.peer == "DDP" else "zero-3"

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{self.size}, {self.sharding}, {stages} beside {self.peer}"


CASES = tuple(
    Case(size, width, samples, peer, stages)
    for size, width, samples in (("large", 512, 64), ("small", 128, 16))
    for peer, stages in (("DDP", LAYERS), ("DDP", 1), ("FSDP2", LAYERS), ("FSDP2, kept", LAYERS))
)


class Layer(nn.Sequential):
    """One sharded module of theirs; values are drawn by its number."""

    def __init__(self, case: Case, number: int) -> None:
        torch.manual_seed(SEED + number)
        width = case.width
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class LayersOfStage(nn.Sequential):
    """One stage of ours."""

    def __init__(self, case: Case, layers: Sequence[int]) -> None:
        super().__init__(*(Layer(case, number) for number in layers))
        self._width = case.width

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, self._width)

    output_shape = input_shape


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def samples_of(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of all replicas; rank r has the r-th MICRO_BATCHES of them."""
    shape = (2, RANKS * MICRO_BATCHES * case.samples, case.width)
    inputs, targets = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    return list(zip(inputs.split(case.samples), targets.split(case.samples), strict=True))


def descent(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, foreach=True)


def torch_trainer(case: Case, rank: int) -> Trainer:
    layers = nn.Sequential(*(Layer(case, number) for number in range(LAYERS)))
    # FSDP2 adds methods to its module.
    model: Any = layers
    if case.peer == "DDP":
        model = DistributedDataParallel(layers)
    else:
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
    optimizer = descent(model)
    mine = samples_of(case)[rank * MICRO_BATCHES : (rank + 1) * MICRO_BATCHES]

    def one_step() -> torch.Tensor:
        total = torch.zeros(())
        for number, (inputs, targets) in enumerate(mine):
            last = number == MICRO_BATCHES - 1
            if case.peer == "FSDP2, kept":
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            with model.no_sync() if case.peer == "DDP" and not last else nullcontext():
                loss = loss_of(model(inputs), targets) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    def train(steps: int) -> float | None:
        total = torch.zeros(())
        for _ in range(steps):
            total = one_step()
        dist.all_reduce(total)
        return total.item() / RANKS

    return train


def parts_of(case: Case) -> list[range]:
    """The layers of each stage."""
    size = LAYERS // case.stages
    return [range(first, first + size) for first in range(0, LAYERS, size)]


def weft_plan(case: Case) -> tuple[Plan, Program]:
    parameters = sum(parameter.numel() for parameter in Layer(case, 0).parameters())
    parts = parts_of(case)
    places = tuple((rank,) for rank in range(RANKS))
    message_bytes = case.samples * case.width * 4
    layout = PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=places,
                gradient_bytes=4 * parameters * len(part),
                weight_bytes=4 * parameters * len(part),
            )
            for part in parts
        ),
        micro_batches=(MICRO_BATCHES,) * RANKS,
        message_bytes={(number, number + 1): message_bytes for number in range(case.stages - 1)},
    )
    methods = {SHARDING: Shared(case.sharding)}
    program = build_training_program(layout, get_schedule("breadth-first"), {}, methods=methods)
    copies = tuple(Replica(ranks=place, micro_batches=MICRO_BATCHES) for place in places)
    plan = Plan(
        model="layers",
        model_fingerprint="0" * 16,
        cluster="this-machine",
        cluster_fingerprint="0" * 16,
        sequence=1,
        global_batch=RANKS * MICRO_BATCHES * case.samples,
        micro_batch_size=case.samples,
        mesh={"pp": 1, "dp": RANKS},
        stages=tuple(Stage(layers=tuple(part), replicas=copies) for part in parts),
        schedule=Choice(name="breadth-first"),
        sharding=case.sharding,
    )
    return plan, program


def weft_trainer(case: Case, runtime: RankRuntime) -> Trainer:
    parts, done = samples_of(case), 0

    def train(steps: int) -> float | None:
        nonlocal done
        results = [runtime.step(step, parts.__getitem__) for step in range(done, done + steps)]
        done += steps
        return results[-1].loss

    return train


def measure(report: Report, case: Case, rank: int, generation: int) -> None:
    theirs = torch_trainer(case, rank)
    plan, whole = weft_plan(case)
    program = part_of(whole, rank)
    with tempfile.TemporaryDirectory(prefix="weft-replicas-") as name:
        recorder = Recorder(Path(name), program=program, plan_id=plan.plan_id, steps=ALL_STEPS)
        stages = {number: LayersOfStage(case, part) for number, part in enumerate(parts_of(case))}
        runtime = RankRuntime(
            plan,
            program,
            stages,
            loss_of,
            descent,
            device="cpu",
            seed=SEED,
            recorder=recorder,
            generation=generation,
        )
        times = side_by_side(weft_trainer(case, runtime), theirs)
        runtime.close()
        recorder.close()
    if rank == 0:
        report.add_cell(str(case), ratio_of(times, target=TARGET))


def worker(report: Report) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    for generation, case in enumerate(CASES):
        if report.missing(str(case)):
            measure(report, case, context.rank, generation)
    context.close()


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__)


def main() -> int:
    asked = options().parse_args()
    report = Report("replicas_vs_torch", asked)
    if asked.worker:
        worker(report)
        return 0
    report.print_machine()
    report.say(f"{WORK}, {LAYERS} layers, {MICRO_BATCHES} micro-batches to a step and rank")
    return launch(__file__, RANKS, asked)


if __name__ == "__main__":
    sys.exit(main())
