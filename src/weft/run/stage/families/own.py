"""Stages of a user's own model: its layers, each with its own initial values."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import nn

from weft.describe.families.own import OwnModel, ShowsLinears
from weft.randomness import counter_seed
from weft.run.stage.layers import run_wired
from weft.run.stage.wiring import SAMPLES, Wiring


class OwnStage(nn.Module):
    """The layers at some positions; parameters are called ``layers.POSITION.NAME`` in any cut.

    Attributes:
        linears: by position, the linear layers, as the model tells them.
    """

    def __init__(self, model: OwnModel, layers: Sequence[int], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._borders = (model.sample_shapes[layers[0]], model.sample_shapes[layers[-1] + 1])
        self.layers = nn.ModuleDict()
        self.linears = {index: model.linears(index) for index in layers if isinstance(model, ShowsLinears)}
        for index in layers:
            # Drawn by position, so that any cut has the same values.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(counter_seed(seed, index))
                self.layers[str(index)] = model.layer(index).to(dtype)

    def layer_functions(self, inputs: torch.Tensor) -> list[Callable[..., torch.Tensor]]:
        """Return the layers in order."""
        first, *others = self.layers.values()
        return [lambda value: first(self._as_computed(value)), *others]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = inputs
        for function in self.layer_functions(inputs):
            value = function(value)
        return value

    def _as_computed(self, inputs: torch.Tensor) -> torch.Tensor:
        # Samples come in one precision for all models.
        weight = next(self.parameters(), inputs)
        return inputs.to(weight.dtype) if inputs.is_floating_point() else inputs

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return no parameters: layers of a user's own model share none."""
        return ()

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[0])

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[1])


class OwnGraphStage(OwnStage):
    """A stage of a user's own model with layers that form a graph."""

    def __init__(self, model: OwnModel, layers: Sequence[int], seed: int, dtype: torch.dtype) -> None:
        super().__init__(model, layers, seed, dtype)
        graph, own = model.layer_graph(), set(layers)
        self._shapes = tuple(model.sample_shapes[1:])
        self._readers = {
            layer: frozenset(consumer for producer, consumer in graph.edges if producer == layer)
            for layer in layers
        }
        feeders = {layer: sorted(graph.feeders[layer]) or [SAMPLES] for layer in layers}
        self._samples_first = {str(layer) for layer in layers if feeders[layer] == [SAMPLES]}
        self.takes = tuple(sorted({one for before in feeders.values() for one in before} - own))
        last = len(graph.layers) - 1
        self.gives = tuple(layer for layer in layers if layer == last or self._readers[layer] - own)
        place = {layer: number for number, layer in enumerate((*self.takes, *layers))}
        self.wiring = Wiring(
            tuple(tuple(place[one] for one in feeders[layer]) for layer in layers),
            tuple(place[layer] for layer in self.gives),
        )

    def layer_functions(self, inputs: torch.Tensor) -> list[Callable[..., torch.Tensor]]:
        """Return the layers in order, each a function of its inputs in the model's graph."""
        return [
            self._of_samples(one) if name in self._samples_first else one for name, one in self.layers.items()
        ]

    # The runtime calls the layers by their wiring, never as a chain.
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return run_wired(self.layer_functions(inputs[0]), self.wiring, inputs, recompute="none", draws=False)

    def readers(self, layer: int) -> Set[int]:
        return self._readers[layer]

    def value_shape(self, layer: int, samples: int) -> tuple[int, ...]:
        return (samples, *self._shapes[layer])

    def _of_samples(self, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda samples: layer(self._as_computed(samples))
