"""What work on every micro-batch costs: one rank trains a model with and without a method.

The methods are `report.micro_batch_norms`, `[clip]` with the least norm, and `[experts]` over the whole step.

Both trainings run in one process, step by step in turns, and go through the whole runtime. One thread and the
time of the process, so that other load on the machine counts little. Runtimes of one and the same program
differ by a few percent, because their tensors lie elsewhere, so both are made anew for every round, in turns
which of them first. The share is the median over rounds of what is added to the median step, with its
bootstrap 95 % interval over rounds.

    python benchmarks/taps.py [MODEL] [--method NAME] [--micro-batch-size N] [--schedule NAME]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import (
    EXPERT_BALANCE,
    MICRO_BATCH_CLIPPING,
    MICRO_BATCH_NORMS,
    Choice,
    Plan,
    Replica,
    Stage,
)
from weft.planning.compile import compile_part
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.state.precision import STEPPED
from weft.run.workspace import Batch

MICRO_BATCHES, ROUNDS, STEPS, WARM_UP = 4, 12, 20, 4
RESAMPLES = 10_000
TARGET = 0.03
SEED = 3


def plan_of(
    config: ModelConfig,
    micro_batch_size: int,
    sequence: int,
    schedule: str,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Plan:
    graph = layer_graph(config)
    replica = Replica(ranks=(0,), micro_batches=MICRO_BATCHES)
    return Plan(
        model=config.name,
        model_fingerprint=graph.fingerprint,
        cluster="this machine",
        cluster_fingerprint="0" * 16,
        sequence=sequence,
        global_batch=MICRO_BATCHES * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision=precision,
        mesh={"dp": 1, "pp": 1},
        stages=(Stage(layers=tuple(range(len(graph.layers))), replicas=(replica,)),),
        schedule=Choice(name=schedule),
    )


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def runtime_of(config: ModelConfig, plan: Plan, generation: int, device: str) -> RankRuntime:
    stages = build_stages(plan, config, 0, SEED, STEPPED[plan.precision])
    return RankRuntime(
        plan,
        compile_part(plan, layer_graph(config), 0),
        {index: stage.to(device) for index, stage in stages.items()},
        mean_loss,
        lambda stage: torch.optim.AdamW(stage.parameters(), lr=1e-3, foreach=True),
        device=device,
        seed=SEED,
        generation=generation,
    )


def batch_of(config: ModelConfig, plan: Plan) -> Batch:
    shape = (plan.micro_batch_size, plan.sequence + 1)
    tokens = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
    return lambda number: (tokens[:, :-1], tokens[:, 1:])


def step_s(runtime: RankRuntime, step: int, batch: Batch, device: str) -> float:
    """Seconds of the process on a CPU, and until all kernels have ended on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    result = runtime.step(step, batch)
    assert result.loss > 0.0
    assert all(sum(numbers) > 0.0 for numbers in result.series.values())
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began


def choice_of(method: str, micro_batch_size: int) -> Choice:
    """The method with its usual options."""
    options: dict[str, dict[str, int | float | str | bool]] = {
        MICRO_BATCH_NORMS: {},
        MICRO_BATCH_CLIPPING: {"micro": "min", "samples": micro_batch_size},
        EXPERT_BALANCE: {"balance": "global-batch"},
    }
    return Choice(name=method, options=options[method])


def added(
    config: ModelConfig, plan: Plan, choice: Choice, number: int, device: str = "cpu"
) -> tuple[float, float]:
    """Seconds of a round: the median step without, and the median of what is added to a step."""
    watched = plan.model_copy(update={"methods": (choice,)})
    plans = (plan, watched)
    runtimes = {
        which: runtime_of(config, plans[which], 2 * number + which, device) for which in _turn(number)
    }
    batch, times = batch_of(config, plan), np.zeros((STEPS + WARM_UP, 2))
    for step in range(STEPS + WARM_UP):
        for which in _turn(step):
            times[step, which] = step_s(runtimes[which], step, batch, device)
    for runtime in runtimes.values():
        runtime.close()
    plain, other = times[WARM_UP:].T
    return float(np.median(plain)), float(np.median(other - plain))


def _turn(number: int) -> tuple[int, int]:
    return (0, 1) if number % 2 else (1, 0)


def figures_of(rounds: Sequence[tuple[float, float]], target: float = TARGET) -> dict[str, Value]:
    """The median step without, what is added to it, and its share with the bootstrap interval."""
    plain_s, added_s = np.array(rounds).T
    draws = np.random.default_rng(SEED).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    low, high = np.percentile(np.median((added_s / plain_s)[draws], 1), [2.5, 97.5]).tolist()
    return {
        "step": Value(float(np.median(plain_s)), "s"),
        "added": Value(float(np.median(added_s)), "s"),
        "share": Value(float(np.median(added_s / plain_s)), "share", target, low=low, high=high),
    }


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", default="gpt-1m")
    known = (MICRO_BATCH_NORMS, MICRO_BATCH_CLIPPING, EXPERT_BALANCE)
    made.add_argument("--method", default=MICRO_BATCH_NORMS, choices=known)
    made.add_argument("--micro-batch-size", type=int, default=2)
    made.add_argument("--sequence", type=int, default=128)
    made.add_argument("--schedule", default="1f1b")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("taps", asked)
    report.print_machine()
    shape = f"{MICRO_BATCHES} micro-batches of {asked.micro_batch_size} x {asked.sequence} tokens"
    cell = f"{asked.method}: {asked.model}, {asked.schedule}, {shape}"
    if not report.missing(cell):
        return
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    config = resolve_model(asked.model, sequence=asked.sequence)
    plan = plan_of(config, asked.micro_batch_size, asked.sequence, asked.schedule)
    choice = choice_of(asked.method, asked.micro_batch_size)
    rounds = [added(config, plan, choice, number) for number in range(ROUNDS)]
    dist.destroy_process_group()
    report.add_cell(cell, figures_of(rounds))


if __name__ == "__main__":
    main()
