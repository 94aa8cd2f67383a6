"""Tiny jobs for tests of the runtime: models, plans, batches and runtimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.describe.added_layers import trained_graph
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.planning.compile import compile_plan
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.state.precision import STEPPED

LEARNING_RATE = 0.5
SEED = 7


def tiny(family: str = "gpt", *, layers: int = 6, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        name=f"tiny-{family}",
        family=family,
        layers=layers,
        hidden=16,
        heads=2,
        key_value_heads=2 if family == "gpt" else 1,
        feed_forward=24,
        vocabulary=19,
        sequence=8,
        tied_embeddings=tied,
    )


def make_plan(
    config: ModelConfig,
    *,
    pp: int = 1,
    dp: int = 1,
    loops: int = 1,
    schedule: str = "gpipe",
    micro_batches: int = 4,
    micro_batch_size: int = 2,
    precision: str = "fp64",
) -> Plan:
    """`micro_batches` per pipeline; the schedule places the stages; rank = pipeline * pp + device."""
    count, graph = pp * loops, layer_graph(config)
    placement = placements(get_schedule(schedule), Pipeline(pp, count, micro_batches))
    share = micro_batches // len(placement)
    borders = [len(graph.layers) * stage // count for stage in range(count + 1)]
    stages = tuple(
        Stage(
            layers=tuple(range(borders[stage], borders[stage + 1])),
            replicas=tuple(
                Replica(ranks=(pipeline * pp + device,), micro_batches=share)
                for pipeline in range(dp)
                for device in devices
            ),
        )
        for stage, devices in enumerate(placement.T.tolist())
    )
    return Plan(
        model=config.name,
        model_fingerprint=graph.fingerprint,
        cluster="test",
        cluster_fingerprint="0" * 16,
        sequence=config.sequence,
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision=precision,
        mesh={"dp": dp, "pp": pp},
        stages=stages,
        schedule=Choice(name=schedule),
    )


def make_program(config: ModelConfig, plan: Plan) -> Program:
    return compile_plan(plan, trained_graph(config, plan.methods))


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
