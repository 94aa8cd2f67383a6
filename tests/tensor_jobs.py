"""Tiny models that tensor and context ranks can divide, their samples and losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from small_jobs import batch_of
from tower_jobs import batches_of_towers, batches_of_vectors, has_several_inputs

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.workspace import Samples


def samples_of(config: ModelConfig, plan: Plan, step: int) -> Callable[[int], Samples]:
    """Tokens, pixels or the inputs of towers, keyed by (step, sample)."""
    if config.is_graph:
        return batches_of_towers(config, plan, step)
    if has_several_inputs(config):
        return batches_of_vectors(config, plan, step)
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
