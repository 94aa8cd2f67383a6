"""Taps: methods' views of micro-batches on their way through a stage.

A tap sees a parameter's gradient before it is added to those of other micro-batches. It sees a layer's input
at the first run, and an output's gradient when all later layers have gone back. A tap gets autograd's own
tensor, on the computing stream, and may keep it until the pass has ended. It may keep those of modules for
longer, which nothing writes to again. Hooks are torch's own. A stage without taps has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.describe.plan import Recompute
from weft.errors import InputError, Violation
from weft.run.stage.layers import LayerFunction, run_layers
from weft.run.stage.wiring import Wired

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Passing:
    """A micro-batch on its way through a stage."""

    step: int
    stage: int
    micro_batch: int


# Takes a parameter's gradient, by the parameter's name in the stage.
SeeGradient = Callable[[Passing, str, torch.Tensor], None]
# Takes a layer's tensor, by the layer's position in the model.
SeeLayer = Callable[[Passing, int, torch.Tensor], None]
# Takes a tensor of a module inside a layer, by the module's name in the stage.
SeeModule = Callable[[Passing, str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Tap:
    """A method's view of one stage on one rank; None for each unwanted function.

    If several ranks divide a stage, each sees its own part. Values of a micro-batch have the weight of its
    loss in the step.

    Attributes:
        gradient: of a parameter; called once per pass for each that the pass used, of a pass in segments once
            per segment.
        parameters: names of the parameters to see; None for all trained ones.
        layer_input: once per forward pass, even if the layer runs again.
        output_gradient: of a layer's output, the last layer's before the loss; once per pass.
        modules: names of modules inside layers, each called once per layer.
        module_input, module_gradient: of these modules, as of layers.
        ended: the pass has made all its gradients. The ranks of a replica call it in the same order and may
            exchange in it.
    """

    gradient: SeeGradient | None = None
    parameters: Collection[str] | None = None
    layer_input: SeeLayer | None = None
    output_gradient: SeeLayer | None = None
    modules: Collection[str] = ()
    module_input: SeeModule | None = None
    module_gradient: SeeModule | None = None
    ended: Callable[[Passing], None] | None = None


class StageTaps:
    """The taps of one stage on one rank.

    Args:
        module: the stage; its parameters have hooks until `close`.
        stage: its number.
        first_layer: position of its first layer in the model.
    """

    def __init__(self, module: nn.Module, stage: int, first_layer: int, taps: Iterable[Tap]) -> None:
        taps = tuple(taps)
        self._stage = stage
        self._first_layer = first_layer
        self._inputs = tuple(one.layer_input for one in taps if one.layer_input is not None)
        self._outputs = tuple(one.output_gradient for one in taps if one.output_gradient is not None)
        self._ended = tuple(one.ended for one in taps if one.ended is not None)
        self._now: Passing | None = None
        # The layer that runs now, for the modules in it.
        self._layer: _LayerRun | None = None
        self._modules = {name for one in taps for name in one.modules}
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._shows_gradient(one.gradient, name))
            for one in taps
            if one.gradient is not None
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and (one.parameters is None or name in one.parameters)
        ]
        self._handles += [
            module.get_submodule(name).register_forward_hook(self._shows_module(one, name))
            for one in taps
            for name in one.modules
        ]

    @property
    def sees_layers(self) -> bool:
        return bool(self._inputs or self._outputs or self._modules)

    def close(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def around(self, micro_batch: int, make: Callable[..., Given], *, ends: bool) -> Callable[..., Given]:
        """Wrap `make`, which makes gradients of a micro-batch, so that taps know the micro-batch.

        `ends` is True if it makes the last of them.
        """

        def make_seen(*given: Any, step: int) -> Given:
            now = self._now = self.passing(step, micro_batch)
            made = make(*given, step=step)
            if ends:
                for ended in self._ended:
                    ended(now)
            return made

        return make_seen

    def passing(self, step: int, micro_batch: int) -> Passing:
        return Passing(step, self._stage, micro_batch)

    def watched(self, functions: Iterable[LayerFunction], now: Passing) -> Sequence[LayerFunction]:
        """Return the stage's layers, extended to show taps the gradients of their outputs."""
        if not self._outputs and not self._modules:
            return tuple(functions)
        return tuple(
            partial(self._run_watched, function, _LayerRun(now), self._first_layer + place)
            for place, function in enumerate(functions)
        )

    def run_layers(
        self,
        functions: Sequence[LayerFunction],
        inputs: torch.Tensor,
        now: Passing,
        *,
        recompute: Recompute,
        draws: bool,
    ) -> torch.Tensor:
        """Run layers as `weft.run.stage.layers.run_layers`; taps see inputs outside of reruns."""
        value = inputs
        for layer, function in enumerate(functions, self._first_layer):
            with torch.no_grad():
                for see in self._inputs:
                    see(now, layer, value.detach())
            value = run_layers((function,), value, recompute=recompute, draws=draws)
        return value

    def _shows_gradient(self, see: SeeGradient, name: str) -> Callable[[torch.Tensor], None]:
        def show(gradient: torch.Tensor) -> None:
            assert self._now is not None, "gradients are made by passes"
            see(self._now, name, gradient)

        return show

    def _shows_module(self, tap: Tap, name: str) -> Callable[..., None]:
        def show(module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            run = self._layer
            if run is None:
                return
            # A layer that runs again shows no input, and its graph is the one that gradients flow through.
            if tap.module_input is not None and show not in run.shown:
                run.shown.add(show)
                tap.module_input(run.now, name, given[0].detach())
            if tap.module_gradient is not None and output.requires_grad:
                _Once(output, [partial(tap.module_gradient, run.now, name)])

        return show

    def _run_watched(
        self, function: LayerFunction, run: _LayerRun, layer: int, value: torch.Tensor
    ) -> torch.Tensor:
        self._layer = run
        try:
            output = function(value)
        finally:
            self._layer = None
        if output.requires_grad:
            # A layer that runs again makes another graph, and no gradient flows through that.
            _Once(output, [partial(see, run.now, layer) for see in self._outputs])
        return output


class _LayerRun:
    """A layer's run on one micro-batch, and the hooks that have shown inputs of modules in it."""

    def __init__(self, now: Passing) -> None:
        self.now = now
        self.shown: set[Callable[..., None]] = set()


class _Once:
    """A hook that shows a tensor's gradient once, though both parts of a split pass may trigger it."""

    def __init__(self, output: torch.Tensor, shown: Sequence[Callable[[torch.Tensor], None]]) -> None:
        self._shown = shown
        output.register_hook(self._show)

    def _show(self, gradient: torch.Tensor) -> None:
        shown, self._shown = self._shown, ()
        for see in shown:
            see(gradient)


def stage_taps(
    stages: Mapping[int, nn.Module], first_layers: Mapping[int, int], taps_of: Callable[[int], Sequence[Tap]]
) -> dict[int, StageTaps]:
    """Return the taps of a rank's stages, for stages that have any.

    Raises:
        InputError: when a tap wants to see layers of a stage where these form a graph.
    """
    found = {stage: taps_of(stage) for stage in stages}
    made = {
        stage: StageTaps(stages[stage], stage, first_layers[stage], taps)
        for stage, taps in found.items()
        if taps
    }
    for stage, one in made.items():
        if one.sees_layers and isinstance(stages[stage], Wired):
            problem = "taps see inputs and outputs of layers in chains only; this stage's form a graph"
            raise InputError(Violation(f"stage {stage}", problem))
    return made
