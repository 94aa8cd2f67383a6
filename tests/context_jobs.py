"""Tiny jobs whose tokens are divided over context ranks, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import WorkerPool
from small_jobs import SEED, descent, make_program, make_runtime
from tensor_jobs import DividedLoss, samples_of, tensor_plan, whole_loss, whole_parameters

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.program.verify import require_valid
from weft.run.context.divided_tokens import DividedTokens
from weft.run.stages import build_stage

STEPS = 2
IGNORED = -100
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def context_plan(
    config: ModelConfig,
    cp: int = 2,
    *,
    tp: int = 1,
    recompute: str = "none",
    sharding: str = "zero-0",
    **options: Any,
) -> Plan:
    """As `make_plan`; a device is `cp` neighbouring groups of `tp` neighbouring ranks."""
    plan = tensor_plan(config, tp=cp * tp, **options)
    mesh = {**plan.mesh, "cp": cp, "tp": tp}
    stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in plan.stages)
    changes = {"mesh": mesh, "stages": stages, "sharding": sharding}
    return plan.model_copy(update=changes)


class TokenLoss:
    """Mean cross entropy, of all tokens or of those of one rank."""

    takes_divided_tokens = True

    def __call__(self, logits: torch.Tensor | DividedTokens, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(logits, DividedTokens):
            return logits.cross_entropy(targets)
        return whole_loss(logits, targets)


def smooth_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of one's own that needs neighbouring tokens, and so all of them."""
    return whole_loss(logits, targets) + (logits[:, 1:] - logits[:, :-1]).square().mean()


class MeanLoss:
    """A loss of one's own that is a mean over tokens."""

    takes_divided_tokens = True

    def __call__(self, logits: torch.Tensor | DividedTokens, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(logits, DividedTokens):
            return whole_loss(logits, targets)
        own = logits.own_targets(targets)
        total = torch.nn.functional.cross_entropy(
            logits.own.flatten(0, 1), own.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return logits.mean(total, (own != IGNORED).sum())


LOSSES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "tokens": TokenLoss(),
    "whole": whole_loss,
    "own": smooth_loss,
    "mean": MeanLoss(),
    "columns": DividedLoss(),
}


def masked(
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches with targets in the first quarter of every sample alone, and one behind it."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch(number)
        targets = targets.clone()
        kept = targets[0, -1].clone()
        targets[:, targets.shape[1] // 4 :] = IGNORED
        targets[0, -1] = kept
        return inputs, targets

    return micro_batch


def samples(config: ModelConfig, plan: Plan, step: int, masks: bool) -> Callable[[int], Any]:
    batch = samples_of(config, plan, step)
    return masked(batch) if masks else batch


def alone(
    config: ModelConfig, plan: Plan, loss: str = "tokens", clip_norm: float | None = None, masks: bool = False
) -> Outcome:
    """One process that accumulates the micro-batches in their order."""
    model = build_stage(config, range(config.layers + 2), SEED, torch.float64)
    optimizer, losses = descent(model), []
    for step in range(STEPS):
        batch, total = samples(config, plan, step, masks), 0.0
        for number in range(plan.micro_batches):
            inputs, targets = batch(number)
            value = LOSSES[loss](model(inputs), targets) / plan.micro_batches
            value.backward()
            total += value.item()
        losses.append(total)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(
    rank: int,
    ranks: int,
    config: ModelConfig,
    plan: Plan,
    loss: str = "tokens",
    clip_norm: float | None = None,
    masks: bool = False,
) -> Outcome:
    runtime = make_runtime(
        rank, config, plan, make_program(config, plan), loss_fn=LOSSES[loss], clip_norm=clip_norm
    )
    losses = [runtime.step(step, samples(config, plan, step, masks)).loss for step in range(STEPS)]
    parameters = whole_parameters(runtime)
    runtime.close()
    return losses, parameters


def require_equal(pool: WorkerPool, config: ModelConfig, plan: Plan, *options: Any) -> None:
    """Losses and parameters of all ranks are those of one process; `options` are those of `alone`."""
    require_valid(make_program(config, plan))
    expected_losses, expected = alone(config, plan, *options)
    seen: set[str] = set()
    for losses, parameters in pool.run(train, config, plan, *options, ranks=plan.ranks):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)
        seen |= set(parameters)
    assert seen == set(expected)
