"""`stage_pass`: a stage's forward pass on one micro-batch: its layers, and the loss in the last stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from weft.program.program import Instruction
from weft.run.parallel.loss_input import loss_input
from weft.run.stage.layers import LayerFunction, layer_functions, run_layers, run_wired
from weft.run.stage.roots import LayersOf, StageRoots
from weft.run.stage.wiring import Wired
from weft.run.workspace import Workspace

Outputs = tuple[torch.Tensor, ...]

# From a stage's inputs, the targets if it reads them, and the step to its outputs or loss, and the other
# roots of its backward pass.
StagePass = Callable[[Sequence[torch.Tensor], torch.Tensor | None, int], Outputs]


class WeightedLoss(Protocol):
    """The loss of a micro-batch times its weight in the step."""

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


class _Pass(Protocol):
    """A stage pass that also takes other layers than the stage's."""

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        step: int,
        layers_of: LayersOf = ...,
    ) -> Outputs: ...


def stage_pass(workspace: Workspace, instruction: Instruction) -> StagePass:
    """Return the function that runs a stage forward; the last stage also computes the weighted loss."""
    run = _own_pass(workspace, instruction)
    for method in workspace.resources.methods.values() if workspace.training else ():
        run = method.around_forward(instruction.stage, instruction.micro_batch, run)
    return run


def _own_pass(workspace: Workspace, instruction: Instruction) -> StagePass:
    """Return the pass without the work of methods around it."""
    stage, number, resources = instruction.stage, instruction.micro_batch, workspace.resources
    last, roots = not resources.borders[stage].after, roots_of(workspace, stage)
    module, layers = resources.stages[stage], resources.layers[stage]
    wiring = module.wiring if isinstance(module, Wired) else None
    training = workspace.training
    draws = training and draws_numbers(module)
    recompute = resources.recompute[stage] if training else "none"
    taps = resources.taps.get(stage) if training else None
    watching = taps if taps is not None and taps.sees_layers else None
    layered = draws or recompute != "none" or watching is not None or wiring is not None or roots is not None
    to_the_loss = _ending_in_the_loss(workspace, stage) if last else _as_they_are

    def seeded(layer: int, function: LayerFunction, step: int) -> LayerFunction:
        def draw_and_run(*inputs: torch.Tensor) -> torch.Tensor:
            workspace.reseed(step, layer, number)
            return function(*inputs)

        return draw_and_run

    def layers_of(inputs: torch.Tensor, step: int) -> Sequence[LayerFunction]:
        functions: Sequence[LayerFunction] = layer_functions(module, inputs) if layered else (module,)
        if draws:
            # A module that does not name its layers is one layer.
            return [seeded(layer, one, step) for layer, one in zip(layers, functions, strict=False)]
        return functions

    def run_functions(functions: _Layers, inputs: Sequence[torch.Tensor]) -> Outputs:
        if wiring is not None:
            return run_wired(functions, wiring, inputs, recompute=recompute, draws=draws)
        return (run_layers(functions, inputs[0], recompute=recompute, draws=draws),)

    def run(
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        step: int,
        layers_of: LayersOf = layers_of,
    ) -> Outputs:
        # To enter the block takes as long as a small layer.
        if torch.is_grad_enabled() == training:
            return run_functions(to_the_loss(layers_of(inputs[0], step), targets), inputs)
        with torch.set_grad_enabled(training):
            return run_functions(to_the_loss(layers_of(inputs[0], step), targets), inputs)

    chosen: _Pass = run
    if watching is not None:

        def run_seen(
            inputs: Sequence[torch.Tensor],
            targets: torch.Tensor | None,
            step: int,
            layers_of: LayersOf = layers_of,
        ) -> Outputs:
            with torch.enable_grad():
                now = watching.passing(step, number)
                functions = to_the_loss(watching.watched(layers_of(inputs[0], step), now), targets)
                return (watching.run_layers(functions, inputs[0], now, recompute=recompute, draws=draws),)

        chosen = run_seen
    if roots is None:
        return chosen

    def run_rooted(inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, step: int) -> Outputs:
        growth = roots.growth(step, number, targets)
        return (*chosen(inputs, targets, step, growth.on(layers_of)), *growth.take())

    return run_rooted


def roots_of(workspace: Workspace, stage: int) -> StageRoots | None:
    """Return the roots of a stage's backward passes besides its outputs, if it has any."""
    return workspace.resources.roots.get(stage) if workspace.training else None


def weighted_loss(workspace: Workspace, stage: int) -> WeightedLoss:
    """Return the function from a last stage's output and its targets to the micro-batch's weighted loss."""
    module, loss_function = workspace.resources.stages[stage], workspace.resources.loss_function
    weight = workspace.micro_batch_weight / workspace.resources.borders[stage].splits

    taken = loss_input(module, loss_function)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mean: object = loss_function(taken(output), targets)
        if not isinstance(mean, torch.Tensor) or mean.numel() != 1:
            given = list(mean.shape) if isinstance(mean, torch.Tensor) else type(mean).__name__
            raise TypeError(f"the loss is {given}; it must be a tensor of one number")
        return mean * weight

    return loss


def draws_numbers(module: nn.Module) -> bool:
    """Return True if the module drops values while it trains."""
    return any(getattr(part, "p", 0) for part in module.modules() if "Dropout" in type(part).__name__)


_Layers = Sequence[LayerFunction]


def _as_they_are(functions: _Layers, targets: torch.Tensor | None) -> _Layers:
    return functions


def _ending_in_the_loss(
    workspace: Workspace, stage: int
) -> Callable[[_Layers, torch.Tensor | None], _Layers]:
    """Return a function from layers and targets to layers that end in the weighted loss."""
    loss = weighted_loss(workspace, stage)

    def to_the_loss(functions: _Layers, targets: torch.Tensor | None) -> _Layers:
        assert targets is not None, "a last stage reads targets"
        *others, final = functions

        def compute(*inputs: torch.Tensor) -> torch.Tensor:
            return loss(final(*inputs), targets)

        return (*others, compute)

    return to_the_loss
