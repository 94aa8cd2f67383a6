"""Tiny convolutional networks, batches of images for them, and what one process alone makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_jobs import LEARNING_RATE, SEED
from torch import nn

from weft.describe.convolutional_models import convolutional_config
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.run.batch_norm import StepBatchNorm
from weft.run.randomness import counter_seed
from weft.run.stages import build_stage

MOMENTUM = 0.1
FAMILIES = ("resnet", "vgg", "alexnet")


def tiny(family: str, **changes: Any) -> ModelConfig:
    """The smallest networks that have everything of their family; VGG and AlexNet drop out."""
    sizes: dict[str, Any] = {
        "resnet": {"hidden": 4, "widths": (4, 8), "depths": (2, 1), "image_size": 16},
        "vgg": {"widths": (4, 6), "depths": (1, 2), "feed_forward": 8, "pooled_size": 2, "image_size": 8},
        "alexnet": {"widths": (2, 3, 4, 3, 3), "feed_forward": 5, "image_size": 63},
    }[family]
    dropout = {} if family == "resnet" else {"dropout": 0.5}
    return convolutional_config(
        f"tiny-{family}", family=family, **{"channels": 3, "vocabulary": 5, **sizes, **dropout, **changes}
    )


def images_of(
    config: ModelConfig, plan: Plan, step: int
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels keyed by (step, micro-batch)."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + number)
        shape = (plan.micro_batch_size, config.channels, config.image_size, config.image_size)
        pixels = torch.randn(shape, generator=generator)
        return pixels, torch.randint(config.vocabulary, (plan.micro_batch_size,), generator=generator)

    return micro_batch


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets)


def whole(config: ModelConfig, dtype: torch.dtype = torch.float64) -> nn.Module:
    return build_stage(config, range(config.layers + 2), SEED, dtype)


def train_alone(config: ModelConfig, plan: Plan, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and parameters and running statistics by name, of one process with micro-batches in order.

    Statistics are made from what the batch norms are given: a mean over the micro-batches of the step, and
    one move towards it.
    """
    model = whole(config)
    norms = {name: part for name, part in model.named_modules() if isinstance(part, StepBatchNorm)}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in norms}
    running = {name: torch.stack([torch.zeros(n), torch.ones(n)]).double() for name, n in _widths(norms)}
    for name, part in norms.items():
        part.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(_moments(inputs[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        batch, total = images_of(config, plan, step), 0.0
        for number in range(plan.micro_batches):
            value, targets = batch(number)
            for layer, function in enumerate(model.layer_functions(value)):
                torch.manual_seed(counter_seed(SEED, step, number, layer))
                value = function(value)
            loss = loss_of(value, targets) * (1.0 / plan.micro_batches)
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        for name, moments in seen.items():
            running[name] += MOMENTUM * (torch.stack(moments).mean(0) - running[name])
            moments.clear()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, (mean, variance) in running.items():
        found |= {f"{name}.running_mean": mean, f"{name}.running_var": variance}
    return losses, found


def _widths(norms: dict[str, StepBatchNorm]) -> list[tuple[str, int]]:
    return [(name, part.num_features) for name, part in norms.items()]


def _moments(maps: torch.Tensor) -> torch.Tensor:
    """Mean and unbiased variance of every channel, shape (2, channels)."""
    values = maps.detach().transpose(0, 1).flatten(1)
    return torch.stack([values.mean(1), values.var(1)])
