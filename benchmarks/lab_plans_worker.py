"""The worker of `benchmarks/lab_plans.py`: one rank inside a lab, which trains every plan in turn."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lab_plans import STEPS, TURNS, WARM_UP_STEPS, model
from torch.nn.functional import cross_entropy

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan_file import load_plan
from weft.planning.compile import compile_part
from weft.run.launch.worker_start import start_worker
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage


def main(folder: Path) -> None:
    """Train every plan in turn; rank 0 writes the median step of each."""
    context = start_worker()
    paths = sorted(folder.glob("plan-*.json"))
    seconds: list[list[float]] = [[] for _ in paths]
    for turn in range(TURNS):
        for number, path in enumerate(paths):
            seconds[number] += trained_s(path, turn * len(paths) + number, model())
    medians = [statistics.median(one) for one in seconds]
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(medians))
    context.close()


def trained_s(path: Path, generation: int, config: ModelConfig) -> list[float]:
    """Seconds between the ends of steps, each that of the last rank."""
    plan = load_plan(path)
    stages = {
        index: build_stage(config, stage.layers, 0, torch.float32)
        for index, stage in enumerate(plan.stages)
        if any(dist.get_rank() in replica.ranks for replica in stage.replicas)
    }
    runtime = RankRuntime(
        plan,
        compile_part(plan, layer_graph(config), dist.get_rank()),
        stages,
        lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
        lambda stage: torch.optim.AdamW(stage.parameters(), lr=1e-6),
        device="cpu",
        seed=0,
        generation=generation,
    )
    tokens = torch.zeros(plan.micro_batch_size, plan.sequence, dtype=torch.long)
    ends = torch.zeros(WARM_UP_STEPS + STEPS, dtype=torch.float64)
    for step in range(len(ends)):
        _ = runtime.step(step, lambda number: (tokens, tokens)).loss
        ends[step] = time.monotonic()
    runtime.close()
    # The clock is the host's, the same for all nodes of the lab.
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    seconds: list[float] = ends.diff()[WARM_UP_STEPS - 1 :].tolist()
    return seconds
