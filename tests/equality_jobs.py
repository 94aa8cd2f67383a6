"""What jobs of the equality table are made of: samples, losses and optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from small_jobs import descent
from tensor_jobs import DividedLoss, samples_of, whole_loss
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import PACKING, Choice
from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.workspace import Samples
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory
from weft.training.tasks.base import Outputs, binary_cross_entropy, cross_entropy, squared_error

IGNORED = -100
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
# Of another package.
SHORTENING = "own_optimizers:Shortening"


def falling(module: nn.Module) -> torch.optim.Optimizer:
    """Plain descent whose learning rate falls after every step."""
    optimizer = descent(module)

    def fall(*_: object) -> None:
        optimizer.param_groups[0]["lr"] -= 0.05

    optimizer.register_step_post_hook(fall)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "descent": descent,
    "falling": falling,
    "adamw": optimizer_factory(ADAMW),
    "sgd": optimizer_factory(replace(ADAMW, name="sgd", learning_rate=0.1)),
    **{
        name: optimizer_factory(replace(ADAMW, name=name, learning_rate=0.01, betas=(0.9, 0.999)))
        for name in ("lamb", "nvlamb", "lans", "muon", SHORTENING)
    },
}


class TokenLoss:
    """Mean cross entropy, of all tokens or of those of one rank."""

    takes_divided_tokens = True

    def __call__(self, logits: torch.Tensor | DividedTokens, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(logits, DividedTokens):
            return logits.cross_entropy(targets)
        return whole_loss(logits, targets)


class KernelLoss:
    """Mean cross entropy of whatever a last stage leaves of its logits, those of a loss kernel too."""

    takes_divided_logits = takes_divided_tokens = takes_unmade_logits = True

    def __call__(self, logits: Outputs, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, targets)


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
    "kernel": KernelLoss(),
    "clicks": binary_cross_entropy,
    "doses": squared_error,
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


def packed(batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> Callable[[int], Samples]:
    """The micro-batches with documents, which end where a token is a multiple of three."""

    def micro_batch(number: int) -> Samples:
        inputs, targets = batch(number)
        borders = [[0, *((row[:-1] % 3 == 0).nonzero().flatten() + 1).tolist(), len(row)] for row in inputs]
        return inputs, targets, [[end - start for start, end in pairwise(one)] for one in borders]

    return micro_batch


def samples(
    config: ModelConfig, job: Any, step: int, masks: bool, choices: Iterable[Choice]
) -> Callable[[int], Samples]:
    """Micro-batches of `job.micro_batch_size` samples by their numbers."""
    batch = samples_of(config, job, step)
    if any(choice.name == PACKING for choice in choices):
        return packed(batch)
    return masked(batch) if masks else batch


def drop_out(modules: Iterable[nn.Module], rate: float) -> None:
    """Have all dropouts drop so many; 0 leaves them as the model has them."""
    for part in (part for module in modules for part in module.modules()):
        if rate and isinstance(part, nn.Dropout):
            part.p = rate
