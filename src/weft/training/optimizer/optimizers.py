"""Optimizers by name: functions from a stage and the settings to a torch optimizer.

An optimizer of another package is called with parameter groups, each with its `weight_decay`, and `lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weft.describe.optimizers import WORK, declared_work, own_optimizer, require_optimizer
from weft.describe.run_file import RunFile
from weft.errors import InputError, Violation
from weft.run.stage.stage_module import StageModule
from weft.training.optimizer.layer_wise import Lamb, Lans, NvLamb
from weft.training.optimizer.muon import Muon

# The defaults of the optimizers that have these settings.
BETAS, MOMENTUM = (0.9, 0.95), 0.9
MUON_MOMENTUM, MATRIX_SCALE = 0.95, "match_rms_adamw"
# Large batches of little noise have squares that change slowly.
BETAS_OF: Mapping[str, tuple[float, float]] = MappingProxyType(
    dict.fromkeys(("lamb", "nvlamb", "lans"), (0.9, 0.999))
)
# From the finished part of the decay, 0 to 1, to the remaining part of the way to the final rate. Cosine:
# Loshchilov and Hutter, arXiv 1608.03983, without restarts.
DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda over: 1.0,
        "linear": lambda over: 1.0 - over,
        "cosine": lambda over: (1.0 + math.cos(math.pi * over)) / 2.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The `[optimizer]` table's settings of the optimizer and its learning rate, with every default."""

    name: str
    learning_rate: float
    weight_decay: float
    warm_up_steps: int = 0
    schedule: str = "constant"
    final_learning_rate: float = 0.0
    decay_steps: int = 1
    betas: tuple[float, float] = BETAS
    momentum: float = MOMENTUM
    matrix_scale: str = MATRIX_SCALE
    decay_all: bool = False

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from its number alone; so a resumed run needs no state.

        It rises linearly over the warm-up and then decays to the final rate. The decay's steps include the
        warm-up.
        """
        if step < self.warm_up_steps:
            return self.learning_rate * ((step + 1) / self.warm_up_steps)
        length = self.decay_steps - self.warm_up_steps
        over = min(1.0, (step - self.warm_up_steps) / length) if length > 0 else 1.0
        remaining = DECAYS[self.schedule](over)
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * remaining


def settings_of(run: RunFile) -> OptimizerSettings:
    """Return the settings of a run file's `[optimizer]` table."""
    table = run.optimizer
    return OptimizerSettings(
        name=table.name,
        learning_rate=table.learning_rate,
        weight_decay=table.weight_decay,
        warm_up_steps=table.warm_up_steps,
        schedule=table.schedule,
        final_learning_rate=table.final_learning_rate or 0.0,
        decay_steps=run.train.steps if table.decay_steps is None else table.decay_steps,
        betas=BETAS_OF.get(table.name, BETAS) if table.betas is None else table.betas,
        momentum=_momentum(table.name) if table.momentum is None else table.momentum,
        matrix_scale=table.matrix_scale or MATRIX_SCALE,
        decay_all=table.decay_all,
    )


def _momentum(name: str) -> float:
    return MUON_MOMENTUM if name == "muon" else MOMENTUM


def hidden_matrices(stage: nn.Module) -> list[nn.Parameter]:
    """Return the matrices, and the stacks of experts' matrices, of a stage's blocks.

    So embeddings, heads, norms, biases and convolutions are none, nor are parameters without gradients.

    Raises:
        InputError: for a stage that does not name its blocks.
    """
    blocks = getattr(stage, "blocks", None)
    if blocks is None:
        problem = f"muon needs the blocks of a stage, and {type(stage).__name__} names none"
        raise InputError(Violation("optimizer.name", problem, "adamw"))
    unlearned = _unlearned(stage)
    return [
        parameter
        for block in blocks
        for module in block.modules()
        if not isinstance(module, nn.Conv1d)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim in (2, 3) and not name.endswith("bias") and id(parameter) not in unlearned
    ]


def _unlearned(stage: nn.Module) -> set[int]:
    """Return the identities of a stage's parameters without gradients."""
    names = stage.unlearned if isinstance(stage, StageModule) else ()
    return {id(stage.get_parameter(name)) for name in names}


def parameter_groups(stage: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Return all parameters of a stage in groups, the group with weight decay first.

    Unless `decay_all`, only matrices have weight decay. Vectors (norms and biases) have none, nor have
    embedding tables, which a tied head shares. Parameters without gradients never have any.
    """
    unlearned = _unlearned(stage)
    tables = {
        id(parameter)
        for module in stage.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }

    def decays(parameter: nn.Parameter) -> bool:
        usual = parameter.ndim >= 2 and id(parameter) not in tables
        return (settings.decay_all or usual) and id(parameter) not in unlearned

    decayed = [parameter for parameter in stage.parameters() if decays(parameter)]
    kept = [parameter for parameter in stage.parameters() if not decays(parameter)]
    return [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, settings.weight_decay), (kept, 0.0))
        if parameters
    ]


# Fused: one kernel reads and writes each state once.


def adamw(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build AdamW: Adam with weight decay outside the moments (Loshchilov and Hutter, arXiv 1711.05101)."""
    groups = parameter_groups(stage, settings)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def adam(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build Adam (Kingma and Ba, arXiv 1412.6980); weight decay is added to the gradient."""
    groups = parameter_groups(stage, settings)
    return torch.optim.Adam(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def sgd(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build stochastic gradient descent with momentum, 0 for none; weight decay is added to the gradient."""
    groups = parameter_groups(stage, settings)
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=True)


def lamb(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build LAMB; vectors (norms and biases) step without ratios of norms."""
    groups = [
        {**group, "params": parameters, "adapts": adapts}
        for group in parameter_groups(stage, settings)
        for adapts in (True, False)
        if (parameters := [one for one in group["params"] if (one.ndim >= 2) == adapts])
    ]
    return Lamb(groups, settings.learning_rate, betas=settings.betas)


def nvlamb(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build NVLAMB: all tensors step with ratios of norms, and with a gradient of norm 1."""
    return NvLamb(parameter_groups(stage, settings), settings.learning_rate, betas=settings.betas)


def lans(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build LANS; all tensors step with ratios of norms."""
    return Lans(parameter_groups(stage, settings), settings.learning_rate, betas=settings.betas)


def muon(stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build Muon for the hidden matrices of a stage, and AdamW for all other parameters."""
    hidden = {id(parameter) for parameter in hidden_matrices(stage)}
    groups = [
        {**group, "params": parameters, "orthogonalises": orthogonalises}
        for group in parameter_groups(stage, settings)
        for orthogonalises in (True, False)
        if (parameters := [one for one in group["params"] if (id(one) in hidden) == orthogonalises])
    ]
    return Muon(
        groups,
        settings.learning_rate,
        momentum=settings.momentum,
        betas=settings.betas,
        scale=settings.matrix_scale,
    )


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


OPTIMIZERS: Mapping[str, Callable[[nn.Module, OptimizerSettings], torch.optim.Optimizer]] = MappingProxyType(
    {
        "adamw": adamw,
        "adam": adam,
        "sgd": sgd,
        "lamb": lamb,
        "nvlamb": nvlamb,
        "lans": lans,
        "muon": muon,
    }
)


def optimizer_factory(settings: OptimizerSettings) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes the named optimizer for one stage.

    Raises:
        InputError: if there is no optimizer of this name, or it cannot be imported.
    """
    require_optimizer(settings.name, "optimizer.name")
    if settings.name in OPTIMIZERS:
        make = OPTIMIZERS[settings.name]
        return lambda stage: make(stage, settings)
    own = own_optimizer(settings.name)
    return lambda stage: _made_by(own, stage, settings)


def _made_by(own: Callable[..., Any], stage: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build another package's optimizer for a stage; pass its maker's declared work on to it."""

    def refusal(problem: str) -> InputError:
        return InputError(Violation("optimizer.name", f"{settings.name!r} {problem}"))

    try:
        optimizer = own(parameter_groups(stage, settings), lr=settings.learning_rate)
    except TypeError as error:
        raise refusal(f"does not take parameter groups and lr: {error}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refusal(f"made {type(optimizer).__name__}, which is no torch optimizer")
    if optimizer.state:
        # Shards or masters replace its parameters before its first step.
        raise refusal("makes its states before its first step, which weft cannot share out")
    said = declared_work(own, settings.name)
    if said is not None:
        setattr(optimizer, WORK, said)
    return optimizer
