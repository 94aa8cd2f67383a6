"""Roots: starts of a stage's backward passes besides its output.

A method names the roots of a stage. The forward pass makes each from a layer's output. The backward pass,
whole or its input part, starts from the output and all roots at once. The gradient of a root, its
coefficient, is looked up when the backward pass is issued. It is known from the beginning, or it is a value
that other work makes. The method declares that value. So the verifier refuses a program with a backward pass
that does not follow its maker. A stage without roots has no such code.
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

# From a stage's input and the step to its layers.
LayersOf = Callable[[torch.Tensor, int], Sequence[LayerFunction]]


@dataclass(frozen=True, kw_only=True)
class Root:
    """One more start of a stage's backward passes.

    Attributes:
        layer: position in the model of the layer; the root is made from this layer's output.
        make: from the pass, that output and the targets to a tensor that depends on the output. If the layer
            runs again, so does this, with the same result; the first result is the root.
        coefficient: the gradient of the root: one number, or one per element. Called when the backward pass
            is issued, after the issue of the work that makes the value.
        reads_targets: True passes the targets to `make`, False None.
        left_as: the value's name, for a stage and micro-batch, under which the forward pass leaves the root;
            None leaves nothing. The reader of the value takes it away.
        ready: of a root that needs only a part of the layer: True once the running pass has computed this
            part. A pass in segments then makes the root, and refuses roots of whole layers.
        forget: drops what such a part has left; called before each part of a pass, for layers that have run
            again.
    """

    layer: int
    make: Callable[[Passing, torch.Tensor, torch.Tensor | None], torch.Tensor]
    coefficient: Callable[[Workspace, Passing], Value[torch.Tensor]]
    reads_targets: bool = False
    left_as: str | None = None
    ready: Callable[[], bool] | None = None
    forget: Callable[[], None] | None = None


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

    @property
    def of_parts(self) -> bool:
        """True if no root needs a whole layer."""
        return all(one.ready is not None for one in self._roots)

    def growth(self, step: int, micro_batch: int, targets: torch.Tensor | None) -> Growth:
        """Return the maker of the roots of one forward pass."""
        return Growth(self._roots, self._layers, Passing(step, self._stage, micro_batch), targets)

    def leave(
        self,
        values: dict[tuple[str, int, int], Value[Any]],
        micro_batch: int,
        content: Mapping[int, Value[torch.Tensor]],
        ended: Completion,
    ) -> None:
        """Leave the roots that the forward pass with this end fills in."""
        for place, name in self._left:
            content[place].completion = ended
            values[name, self._stage, micro_batch] = content[place]

    def empty(self) -> dict[int, Value[torch.Tensor]]:
        """Return empty values for the roots that others read, by their places."""
        return {place: Value() for place, _ in self._left}

    def coefficients(self, workspace: Workspace, micro_batch: int) -> tuple[Value[torch.Tensor], ...]:
        """Return the coefficients of all roots for the backward pass that is being issued."""
        now = Passing(workspace.step, self._stage, micro_batch)
        return tuple(one.coefficient(workspace, now) for one in self._roots)

    def starting(
        self, differentiate: Callable[..., Any], loss_factor: Callable[[], float | torch.Tensor]
    ) -> Callable[..., Any]:
        """Wrap `differentiate` to take coefficients as values in place of the roots' gradients.

        `loss_factor` is the factor of all losses, which coefficients do not have yet.
        """
        count = len(self._roots)

        def differentiate_all(
            inputs: Sequence[torch.Tensor],
            outputs: Sequence[torch.Tensor],
            gradients: Sequence[Any],
            *,
            step: int,
        ) -> Any:
            pairs = zip(outputs[-count:], gradients[-count:], strict=True)
            factor = loss_factor()
            begins = (root_gradient(root, coefficient, factor) for root, coefficient in pairs)
            return differentiate(inputs, outputs, (*gradients[:-count], *begins), step=step)

        return differentiate_all


def root_gradient(
    root: torch.Tensor, coefficient: Value[torch.Tensor], factor: float | torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a root, of its shape; `factor` is that of all losses."""
    return (coefficient.content * factor).to(root).expand_as(root)


class Growth:
    """The maker of the roots of one forward pass; layers that run again later add no roots."""

    def __init__(
        self, roots: Sequence[Root], layers: Sequence[int], now: Passing, targets: torch.Tensor | None
    ) -> None:
        self._roots = roots
        self._layers = layers
        self._now = now
        self._targets = targets
        self._made: dict[int, torch.Tensor] | None = {}

    def on(self, layers_of: LayersOf) -> LayersOf:
        """Return the same layers, extended to make the roots of their outputs."""

        def grown(inputs: torch.Tensor, step: int) -> Sequence[LayerFunction]:
            # A module that does not name its layers is one layer.
            named = zip(self._layers, layers_of(inputs, step), strict=False)
            return [self._growing(layer, function) for layer, function in named]

        return grown

    def forget(self) -> None:
        """Drop what layers that have run again have left, so that a root is made of this pass alone."""
        for one in self._roots:
            if one.forget is not None:
                one.forget()

    def ready(self, output: torch.Tensor) -> dict[int, torch.Tensor]:
        """Make the roots that are ready, and return them by their places; `output` is that so far."""
        return {
            place: self._make(place, output)
            for place, one in enumerate(self._roots)
            if one.ready is not None and one.ready()
        }

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the roots in their order, once; later results of rerun layers are dropped.

        Raises:
            RunError: when the stage does not name the layer of a root.
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
            self._make(place, output)
        return output

    def _make(self, place: int, output: torch.Tensor) -> torch.Tensor:
        one = self._roots[place]
        root = one.make(self._now, output, self._targets if one.reads_targets else None)
        if self._made is not None:
            self._made[place] = root
        return root


def stage_roots(
    layers: Mapping[int, Sequence[int]], roots_of: Callable[[int], Sequence[Root]]
) -> dict[int, StageRoots]:
    """Return the roots of a rank's stages with these layers, for stages that have any."""
    found = {stage: roots_of(stage) for stage in layers}
    return {stage: StageRoots(stage, layers[stage], roots) for stage, roots in found.items() if roots}
