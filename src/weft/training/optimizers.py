"""Optimizers by name: each turns a stage's parameters into a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from weft.errors import require_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The `[optimizer]` table; the learning rate rises linearly over `warm_up_steps` and stays."""

    name: str
    learning_rate: float
    warm_up_steps: int
    betas: tuple[float, float]
    weight_decay: float


def adamw(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW over all parameters of a stage.

    Weight decay applies to matrices only: not to vectors (norms and biases) and not to embedding tables,
    which a tied head shares.
    """
    tables = {
        id(parameter)
        for module in stage.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    decayed = [p for p in stage.parameters() if p.ndim >= 2 and id(p) not in tables]
    kept = [p for p in stage.parameters() if p.ndim < 2 or id(p) in tables]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, settings.weight_decay), (kept, 0.0))
        if parameters
    ]
    # foreach updates all tensors of a stage in a few calls, whose arithmetic is the single-tensor one.
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, foreach=True)


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of a step: a function of its number alone, so that a resumed run needs no memory of it."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warm_up_steps))


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


OPTIMIZERS: Mapping[str, Callable[[nn.Module, OptimizerSettings], torch.optim.Optimizer]] = MappingProxyType(
    {"adamw": adamw}
)


def optimizer_factory(settings: OptimizerSettings) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function that makes the named optimizer for one stage.

    Raises:
        InputError: when there is no optimizer of that name.
    """
    require_choice("optimizer.name", settings.name, OPTIMIZERS)
    make = OPTIMIZERS[settings.name]
    return lambda stage: make(stage, settings)
