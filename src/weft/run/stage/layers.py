"""The run of a stage's layers in order; `recompute` decides which values each keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from weft.bundles import runtime_parts
from weft.describe.plan import Recompute
from weft.run.stage.wiring import Wiring

# Takes one value in a chain, and several where a layer joins them.
LayerFunction = Callable[..., torch.Tensor]
# What a function makes that runs again: a tensor, or several.
Made = TypeVar("Made")


class RunOne(Protocol):
    """A function that runs a layer on its inputs; `draws`: whether it draws random numbers."""

    def __call__(self, function: Callable[..., Made], *inputs: torch.Tensor, draws: bool) -> Made: ...


@dataclass(frozen=True, kw_only=True)
class RunLayer:
    """A way to run the layers of stages with one value of `recompute`; a method contributes it.

    `run` gets the layer, its inputs, and True if it draws from torch's generators.
    """

    word: Recompute
    run: RunOne


@runtime_checkable
class Layered(Protocol):
    """A stage that names its layers."""

    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        """Return the functions that, in order, turn the stage's input into its output."""
        ...


def layer_functions(module: nn.Module, inputs: torch.Tensor) -> Sequence[LayerFunction]:
    """Return the layers of a stage; a module that does not name them is one layer."""
    return module.layer_functions(inputs) if isinstance(module, Layered) else (module,)


def run_layers(
    functions: Sequence[LayerFunction], inputs: torch.Tensor, *, recompute: Recompute, draws: bool
) -> torch.Tensor:
    """Return the output of the functions, run in order; `draws`: whether they draw random numbers."""
    value = inputs
    run = run_of(recompute)
    for function in functions:
        value = function(value) if run is None else run(function, value, draws=draws)
    return value


def run_wired(
    functions: Sequence[LayerFunction],
    wiring: Wiring,
    inputs: Sequence[torch.Tensor],
    *,
    recompute: Recompute,
    draws: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a stage with layers that read each other by `wiring`."""
    values, run = list(inputs), run_of(recompute)
    for function, read in zip(functions, wiring.reads, strict=True):
        given = [values[place] for place in read]
        values.append(function(*given) if run is None else run(function, *given, draws=draws))
    return tuple(values[place] for place in wiring.gives)


@cache
def run_of(recompute: Recompute) -> RunOne | None:
    """Return the function that runs layers; None for a plain call, which is faster for tiny layers."""
    if recompute == "none":
        return None
    found: RunOne = next(one.run for one in runtime_parts(RunLayer) if one.word == recompute)
    return found
