"""The executor against `torch.distributed.pipelining`: same stages, ranks, orders and threads, in one run.

Blocks of steps alternate between the two, so that both meet the same moods of the machine. A step trains:
forward, backward and an SGD step on every rank; weft records every instruction, torch has nothing to record.
The ratio of their times comes with a bootstrap interval over the blocks.

    python benchmarks/executor_vs_torch.py            # 2 ranks
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from beside import ALL_STEPS, WORK, Trainer, ratio_of, side_by_side
from harness import Report, launch, parser_of_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.run.launch.worker_start import start_worker
from weft.run.record.recorder import Recorder
from weft.run.runtime import RankRuntime

MICRO_BATCHES = 8
LEARNING_RATE = 1e-3
SEED = 5


@dataclass(frozen=True, slots=True)
class Case:
    """An order on stages of `depth` square layers; `target` bounds ours / torch's time from above."""

    size: str
    schedule: str
    loops: int
    width: int
    depth: int
    samples: int
    target: float

    def __str__(self) -> str:
        return f"{self.size}, {self.schedule}, loops {self.loops}"


def cell_of(case: Case, ranks: int) -> str:
    return f"{ranks} ranks, {case}"


def _cases() -> tuple[Case, ...]:
    orders = (("1f1b", 1, 0.9), ("depth-first", 2, 0.8), ("breadth-first", 2, 0.8))
    large = (Case("large", name, loops, 512, 4 // loops, 64, 1.03) for name, loops, _ in orders)
    tiny = (Case("tiny", name, loops, 16, 2, 4, target) for name, loops, target in orders)
    return (*large, *tiny)


TORCH_SCHEDULES = {
    "1f1b": Schedule1F1B,
    "depth-first": ScheduleInterleaved1F1B,
    "breadth-first": ScheduleLoopedBFS,
}


class Layers(nn.Sequential):
    """One stage, the same for both; values are drawn by its number."""

    def __init__(self, case: Case, stage: int) -> None:
        torch.manual_seed(SEED + stage)
        blocks = (nn.Sequential(nn.Linear(case.width, case.width), nn.GELU()) for _ in range(case.depth))
        super().__init__(*blocks)
        self._width = case.width

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, self._width)

    output_shape = input_shape


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def samples_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (2, MICRO_BATCHES * case.samples, case.width)
    inputs, targets = torch.randn(shape, generator=generator)
    return inputs, targets


def descent(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, foreach=True)


def torch_trainer(case: Case, rank: int, ranks: int) -> Trainer:
    count = ranks * case.loops
    modules = [Layers(case, stage) for stage in range(rank, count, ranks)]
    stages = [
        PipelineStage(module, stage, count, torch.device("cpu"))
        for module, stage in zip(modules, range(rank, count, ranks), strict=True)
    ]
    optimizers = [descent(module) for module in modules]
    schedule = TORCH_SCHEDULES[case.schedule](
        stages[0] if case.loops == 1 else stages, n_microbatches=MICRO_BATCHES, loss_fn=loss_of
    )
    inputs, targets = samples_of(case)
    given = (inputs,) if rank == 0 else ()
    last = rank == (count - 1) % ranks

    def train(steps: int) -> float | None:
        losses: list[torch.Tensor] = []
        for _ in range(steps):
            losses = []
            schedule.step(*given, target=targets if last else None, losses=losses if last else None)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses).mean().item() if last else None

    return train


def weft_program(case: Case, ranks: int, micro_batches: int = MICRO_BATCHES) -> Program:
    count = ranks * case.loops
    payload = case.samples * case.width * 4
    layout = PipelineLayout(
        stages=tuple(StageLayout(replicas=((stage % ranks,),)) for stage in range(count)),
        micro_batches=(micro_batches,),
        message_bytes={(stage, stage + 1): payload for stage in range(count - 1)},
    )
    return build_training_program(layout, get_schedule(case.schedule), {})


def weft_plan(case: Case, ranks: int, micro_batches: int = MICRO_BATCHES) -> Plan:
    return Plan(
        model="layers",
        model_fingerprint="0" * 16,
        cluster="this-machine",
        cluster_fingerprint="0" * 16,
        sequence=1,
        global_batch=micro_batches * case.samples,
        micro_batch_size=case.samples,
        mesh={"pp": ranks},
        stages=tuple(
            Stage(layers=(stage,), replicas=(Replica(ranks=(stage % ranks,), micro_batches=micro_batches),))
            for stage in range(ranks * case.loops)
        ),
        schedule=Choice(name=case.schedule),
    )


def weft_runtime(
    case: Case, rank: int, ranks: int, folder: Path, generation: int
) -> tuple[RankRuntime, Recorder]:
    plan, part = weft_plan(case, ranks), part_of(weft_program(case, ranks), rank)
    recorder = Recorder(folder, program=part, plan_id=plan.plan_id, steps=ALL_STEPS)
    stages = {stage: Layers(case, stage) for stage in range(rank, ranks * case.loops, ranks)}
    runtime = RankRuntime(
        plan,
        part,
        stages,
        loss_of,
        descent,
        device="cpu",
        seed=SEED,
        recorder=recorder,
        generation=generation,
    )
    return runtime, recorder


def weft_trainer(case: Case, runtime: RankRuntime) -> Trainer:
    inputs, targets = samples_of(case)
    parts = list(zip(inputs.split(case.samples), targets.split(case.samples), strict=True))
    done = 0

    def train(steps: int) -> float | None:
        nonlocal done
        results = [runtime.step(step, parts.__getitem__) for step in range(done, done + steps)]
        done += steps
        return results[-1].loss

    return train


def measure(report: Report, case: Case, rank: int, ranks: int, generation: int) -> None:
    theirs = torch_trainer(case, rank, ranks)
    with tempfile.TemporaryDirectory(prefix="weft-executor-") as name:
        runtime, recorder = weft_runtime(case, rank, ranks, Path(name), generation)
        ours = weft_trainer(case, runtime)
        times = side_by_side(ours, theirs)
        runtime.close()
        recorder.close()
    if rank == 0:
        report.add_cell(cell_of(case, ranks), ratio_of(times, target=case.target))


def worker(report: Report) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    for generation, case in enumerate(_cases()):
        if report.missing(cell_of(case, ranks)):
            measure(report, case, context.rank, ranks, generation)
    context.close()


def options() -> argparse.ArgumentParser:
    return parser_of_ranks(__doc__, ranks=2)


def main() -> int:
    asked = options().parse_args()
    report = Report("executor_vs_torch", asked)
    if asked.worker:
        worker(report)
        return 0
    report.print_machine()
    report.say(f"{WORK}, {MICRO_BATCHES} micro-batches")
    return launch(__file__, asked.ranks, asked)


if __name__ == "__main__":
    sys.exit(main())
