"""Tiny convolutional networks, batches of images for them, and what moves their running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_jobs import SEED
from torch import nn

from weft.describe.convolutional_models import convolutional_config
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.run.stage.batch_norm import StepBatchNorm
from weft.run.stage.build import build_stage

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


def whole(config: ModelConfig, dtype: torch.dtype = torch.float64) -> nn.Module:
    return build_stage(config, range(config.layers + 2), SEED, dtype)


class RunningStatistics:
    """What moves the running statistics of all batch norms of one process's model, once per step.

    They move towards the mean over the micro-batches of the step, of what the batch norms are given.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [part for part in model.modules() if isinstance(part, StepBatchNorm)]
        self._given: dict[StepBatchNorm, list[torch.Tensor]] = {part: [] for part in norms}
        for part in norms:
            part.register_forward_pre_hook(self._take)

    def _take(self, part: StepBatchNorm, inputs: tuple[torch.Tensor]) -> None:
        if part.training:
            self._given[part].append(_moments(inputs[0]))

    def end_step(self) -> None:
        for part, given in self._given.items():
            for running, mean in zip(part.statistics(), torch.stack(given).mean(0), strict=True):
                running += MOMENTUM * (mean - running)
            part.num_batches_tracked += 1
            given.clear()


def _moments(maps: torch.Tensor) -> torch.Tensor:
    """Mean and unbiased variance of every channel, shape (2, channels)."""
    values = maps.detach().transpose(0, 1).flatten(1)
    return torch.stack([values.mean(1), values.var(1)])
