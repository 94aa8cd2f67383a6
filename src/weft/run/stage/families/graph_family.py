"""The common part of stages of families that are graphs: layers by their names there, wired as it says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_layers import HeldByTensorRanks
from weft.run.stage.graph_stage import GraphStage
from weft.run.stage.layers import LayerFunction
from weft.run.stage.stage_module import StageModule


# As a module of a graph, it takes several values.
class GraphFamilyStage(GraphStage, StageModule):  # type: ignore[misc]
    """Layers at any positions; a parameter is called by its layer's name in the graph, then its own."""

    held = MappingProxyType[str, HeldByTensorRanks]({})
    regions = ()
    region_ends = ()

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        graph = layer_graph(config)
        self.wire(graph, layers, [self.sample_shape(config, one.name) for one in graph.layers])
        inner = {layer: sum(self._shapes[feeder][-1] for feeder in graph.feeders[layer]) for layer in layers}
        self._names = {layer: graph.layers[layer].name for layer in layers}
        for layer, name in self._names.items():
            _place(self, name, self.make(name, sum(graph.inputs_read[layer]), inner[layer]))
        self._functions = tuple(map(self.block, layers))

    @staticmethod
    @abstractmethod
    def sample_shape(config: ModelConfig, layer: str) -> tuple[int, ...]:
        """Return the shape of the output of the layer of that name, of one sample."""

    @abstractmethod
    def make(self, layer: str, number: int, inner: int) -> nn.Module:
        """Return the module of the layer of that name.

        Args:
            number: of the input of a sample that it reads, if it reads one.
            inner: the sum of its producers' widths.
        """

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Empty: tensor ranks cannot divide these families."""
        return ()

    def block(self, layer: int) -> nn.Module:
        """Return the module of the layer at a position in the model; the stage must have it."""
        return self.get_submodule(self._names[layer])

    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        return self._functions


def _place(stage: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module at the end of a path of names."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in stage._modules:
            stage.add_module(part, nn.Module())
        stage = stage.get_submodule(part)
    stage.add_module(leaf, module)
