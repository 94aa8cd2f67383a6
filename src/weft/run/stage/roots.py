"""Roots: what a stage's backward passes start from, beside its output.

A method names the roots of a stage. Each is made of a layer's output while a micro-batch goes forward, and
the backward pass, whole or its input part, starts from the output and from all of them at once. The gradient
of a root, its coefficient, is asked for when the backward pass is issued: it may be known from the beginning,
or be a value that others make in between. The method declares that value, so that the verifier refuses a
program whose backward pass does not follow who makes it. A stage without roots has none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import RunError
from weft.run.stage.layers import LayerFunction
from weft.run.stage.taps import Passing
from weft.run.streams import Completion, Value

if TYPE_CHECKING:
    from weft.run.workspace import Workspace

# Of a stage's input and the step.
LayersOf = Callable[[torch.Tensor, int], Sequence[LayerFunction]]


@dataclass(frozen=True, kw_only=True)
class Root:
    """One more start of a stage's backward passes.

    Attributes:
        layer: position in the model of the layer whose output it is made of.
        make: of the pass, that output and the targets, a tensor that depends on the output. Where the layer
            is run again, so is this, and must compute the same; what came first is the root.
        coefficient: the gradient of the root, one number for all elements or one for each. Asked for when the
            backward pass is issued, which is after whoever makes the value was.
        reads_targets: the targets are given to `make`, else None.
        left_as: the name of the value, of the stage and micro-batch, in which the forward pass leaves the
            root for others to look at; None where nobody does. Who reads it takes it away.
    """

    layer: int
    make: Callable[[Passing, torch.Tensor, torch.Tensor | None], torch.Tensor]
    coefficient: Callable[[Workspace, Passing], Value[torch.Tensor]]
    reads_targets: bool = False
    left_as: str | None = None


class StageRoots:
    """The roots of one stage on one rank.

    Args:
        stage: its number.
        layers: positions of its layers in the model.
    """

    def __init__(self, stage: int, layers: Sequence[int], roots: Sequence[Root]) -> None:
        self._stage = stage
        self._layers = layers
        self._roots = tuple(roots)
        self._left = tuple((place, one.left_as) for place, one in enumerate(self._roots) if one.left_as)
        self.reads_targets = any(one.reads_targets for one in self._roots)

    def growth(self, step: int, micro_batch: int, targets: torch.Tensor | None) -> Growth:
        """What makes the roots of one forward pass."""
        return Growth(self._roots, self._layers, Passing(step, self._stage, micro_batch), targets)

    def leave(
        self,
        values: dict[tuple[str, int, int], Value[Any]],
        micro_batch: int,
        content: Mapping[int, Value[torch.Tensor]],
        ended: Completion,
    ) -> None:
        """Leave what the forward pass that has this end fills in."""
        for place, name in self._left:
            content[place].completion = ended
            values[name, self._stage, micro_batch] = content[place]

    def empty(self) -> dict[int, Value[torch.Tensor]]:
        """Room for the roots that others look at, by their places."""
        return {place: Value() for place, _ in self._left}

    def coefficients(self, workspace: Workspace, micro_batch: int) -> tuple[Value[torch.Tensor], ...]:
        """With what the backward pass that is issued now starts from each root."""
        now = Passing(workspace.step, self._stage, micro_batch)
        return tuple(one.coefficient(workspace, now) for one in self._roots)

    def starting(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        """The same, given coefficients as values in place of the gradients of all roots but the outputs."""
        count = len(self._roots)

        def differentiate_all(
            inputs: Sequence[torch.Tensor],
            outputs: Sequence[torch.Tensor],
            gradients: Sequence[Any],
            *,
            step: int,
        ) -> Any:
            pairs = zip(outputs[-count:], gradients[-count:], strict=True)
            begins = (coefficient.content.to(root).expand_as(root) for root, coefficient in pairs)
            return differentiate(inputs, outputs, (*gradients[:-count], *begins), step=step)

        return differentiate_all


class Growth:
    """Makes the roots of one forward pass; layers that are run again later make no others."""

    def __init__(
        self, roots: Sequence[Root], layers: Sequence[int], now: Passing, targets: torch.Tensor | None
    ) -> None:
        self._roots = roots
        self._layers = layers
        self._now = now
        self._targets = targets
        self._made: dict[int, torch.Tensor] | None = {}

    def on(self, layers_of: LayersOf) -> LayersOf:
        """The same layers, which make the roots of their outputs, too."""

        def grown(inputs: torch.Tensor, step: int) -> Sequence[LayerFunction]:
            # A module that does not name its layers is one.
            named = zip(self._layers, layers_of(inputs, step), strict=False)
            return [self._growing(layer, function) for layer, function in named]

        return grown

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the roots in their order, once; what layers that are run again make afterwards is let go of.

        Raises:
            RunError: when the stage has not named the layer that one is made of.
        """
        made, self._made = self._made, None
        assert made is not None, "the roots of a pass are taken once"
        for place, one in enumerate(self._roots):
            if place not in made:
                raise RunError(f"stage {self._now.stage} names no layer {one.layer}, which has a root")
        return tuple(made[place] for place in range(len(self._roots)))

    def _growing(self, layer: int, function: LayerFunction) -> LayerFunction:
        places = [place for place, one in enumerate(self._roots) if one.layer == layer]
        return partial(self._run, function, places) if places else function

    def _run(self, function: LayerFunction, places: Sequence[int], *values: torch.Tensor) -> torch.Tensor:
        output = function(*values)
        for place in places:
            one = self._roots[place]
            root = one.make(self._now, output, self._targets if one.reads_targets else None)
            if self._made is not None:
                self._made[place] = root
        return output


def stage_roots(
    layers: Mapping[int, Sequence[int]], roots_of: Callable[[int], Sequence[Root]]
) -> dict[int, StageRoots]:
    """By stage of a rank with these layers, for those that have roots beside their outputs."""
    found = {stage: roots_of(stage) for stage in layers}
    return {stage: StageRoots(stage, layers[stage], roots) for stage, roots in found.items() if roots}
