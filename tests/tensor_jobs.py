"""Tiny models that tensor and context ranks can divide, their samples and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from small_jobs import batch_of, tiny

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.run.parallel.divided_logits import DividedLogits


def divisible(family: str, *, sequence: int = 8, heads: int = 2, tied: bool = False) -> ModelConfig:
    """Two blocks; a vocabulary that no number of ranks divides."""
    config = replace(tiny(family, layers=2, tied=tied), sequence=sequence, heads=heads, key_value_heads=heads)
    if family == "llama":
        return replace(config, heads=2 * heads)
    if family == "vit":
        # Nine or four patches and the class token, of which two ranks divide ten and not five.
        size = 6 if sequence % 2 == 0 else 4
        return replace(
            config, image_size=size, patch_size=2, channels=3, sequence=(size // 2) ** 2 + 1, vocabulary=5
        )
    return config


def samples_of(
    config: ModelConfig, plan: Plan, step: int
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, or pixels keyed by (step, sample)."""
    if not config.reads_images:
        return batch_of(config, plan, step)

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = number * plan.micro_batch_size
        shape = (config.channels, config.image_size, config.image_size)
        samples = []
        for sample in range(first, first + plan.micro_batch_size):
            generator = torch.Generator().manual_seed(1000 * step + sample)
            label = torch.randint(config.vocabulary, (), generator=generator)
            samples.append((torch.randn(shape, generator=generator), label))
        return torch.stack([one for one, _ in samples]), torch.stack([one for _, one in samples])

    return micro_batch


class DividedLoss:
    """Mean cross entropy, of whole logits or of shares of them."""

    takes_divided_logits = True

    def __call__(self, logits: torch.Tensor | DividedLogits, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(logits, DividedLogits):
            return logits.cross_entropy(targets)
        return whole_loss(logits, targets)


def whole_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
