"""Tiny jobs for tests of the runtime: models, plans, batches and runtimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.state.precision import STEPPED

LEARNING_RATE = 0.5
SEED = 7


def batch_of(
    config: ModelConfig, plan: Plan, step: int
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Samples keyed by (step, sample), so that the cut into micro-batches does not change them."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = number * plan.micro_batch_size
        samples = [
            torch.randint(
                config.vocabulary,
                (config.sequence + 1,),
                generator=torch.Generator().manual_seed(1000 * step + sample),
            )
            for sample in range(first, first + plan.micro_batch_size)
        ]
        tokens = torch.stack(samples)
        return tokens[:, :-1], tokens[:, 1:]

    return micro_batch


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def descent(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def make_runtime(rank: int, config: ModelConfig, plan: Plan, program: Program, **options: Any) -> RankRuntime:
    stages = build_stages(plan, config, rank, SEED, STEPPED[plan.precision])
    factory = options.pop("optimizer_factory", descent)
    loss_fn = options.pop("loss_fn", loss_of)
    return RankRuntime(
        plan, part_of(program, rank), stages, loss_fn, factory, device="cpu", seed=SEED, **options
    )


def parameters_of(runtime: RankRuntime) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for module in runtime.stages.values()
        for name, parameter in module.named_parameters()
    }
