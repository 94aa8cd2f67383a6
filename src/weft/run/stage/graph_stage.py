"""`GraphStage`: the wiring of a stage from the graph of its model."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from weft.describe.layer_graph import LayerGraph
from weft.run.stage.layers import LayerFunction, run_wired
from weft.run.stage.wiring import Wiring


class GraphStage:
    """A stage with layers that form a graph, as the model's `LayerGraph` has them; a base for modules."""

    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        """Return the layers in order, each a function of its inputs in the model's graph."""
        raise NotImplementedError

    def wire(self, graph: LayerGraph, layers: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> None:
        """Set the attributes of `Wired`, for layers at these positions.

        A layer is called with the inputs of a sample that it reads, then with its producers' outputs.
        `shapes` has the shape of each layer's output, of one sample.
        """
        own = set(layers)
        self._shapes = tuple(shapes)
        self._readers = {
            layer: frozenset(consumer for producer, consumer in graph.edges if producer == layer)
            for layer in layers
        }
        self.inputs = tuple(sorted({number for layer in layers for number in graph.inputs_read[layer]}))
        self.takes = tuple(sorted({one for layer in layers for one in graph.feeders[layer]} - own))
        last = len(graph.layers) - 1
        self.gives = tuple(layer for layer in layers if layer == last or self._readers[layer] - own)
        first = len(self.inputs)
        place = {layer: first + number for number, layer in enumerate((*self.takes, *layers))}
        self.wiring = Wiring(
            tuple(
                (
                    *(self.inputs.index(number) for number in graph.inputs_read[layer]),
                    *(place[one] for one in sorted(graph.feeders[layer])),
                )
                for layer in layers
            ),
            tuple(place[layer] for layer in self.gives),
        )

    # The runtime calls the layers by their wiring, never as a chain.
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run_wired(self.layer_functions(inputs[0]), self.wiring, inputs, recompute="none", draws=False)

    def readers(self, layer: int) -> Set[int]:
        return self._readers[layer]

    def value_shape(self, layer: int, samples: int) -> tuple[int, ...]:
        return (samples, *self._shapes[layer])
