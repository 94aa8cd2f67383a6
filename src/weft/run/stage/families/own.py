"""Stages of a user's own model: its layers, each with its own initial values."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import nn

from weft.describe.families.own import OwnModel, SharesParameters, ShowsLinears
from weft.randomness import counter_seed
from weft.run.stage.graph_stage import GraphStage


class OwnStage(nn.Module):
    """The layers at some positions; parameters are called ``layers.POSITION.NAME`` in any cut.

    Those of several layers are called ``shared.NUMBER``.

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
        self.shared = nn.ParameterDict()
        self._tied = self._share(model, set(layers)) if isinstance(model, SharesParameters) else ()

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

    def _share(self, model: SharesParameters, layers: Set[int]) -> tuple[nn.Parameter, ...]:
        """Move common parameters from their layers to `shared`; return those that other stages use, too."""
        found = []
        for number, names in enumerate(model.shared_names()):
            own = [index for index in names if index in layers]
            if not own:
                continue
            parameter = self.layers[str(own[0])].get_parameter(names[own[0]])
            for index in own:
                path, _, name = names[index].rpartition(".")
                holder = self.layers[str(index)].get_submodule(path)
                del holder._parameters[name]
                # No parameter of the layer: it has one name in any cut.
                holder.__dict__[name] = parameter
            self.shared[str(number)] = parameter
            if len(own) < len(names):
                found.append(parameter)
        return tuple(found)

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters that layers of other stages use, too, in the order of the graph's."""
        return self._tied

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[0])

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[1])


def own_stage(model: OwnModel, layers: Sequence[int], seed: int, dtype: torch.dtype) -> OwnStage:
    """Build a stage with the layers at some positions, a chain or a graph as the model is."""
    return (OwnStage if model.layer_graph().is_chain else OwnGraphStage)(model, layers, seed, dtype)


# As a module of a graph, it takes several values.
class OwnGraphStage(GraphStage, OwnStage):  # type: ignore[misc]
    """A stage of a user's own model with layers that form a graph."""

    def __init__(self, model: OwnModel, layers: Sequence[int], seed: int, dtype: torch.dtype) -> None:
        super().__init__(model, layers, seed, dtype)
        graph = model.layer_graph()
        self.wire(graph, layers, model.sample_shapes[graph.input_count :])
        self._reading_samples = {str(layer) for layer in layers if graph.inputs_read[layer]}

    def layer_functions(self, inputs: torch.Tensor) -> list[Callable[..., torch.Tensor]]:
        """Return the layers in order, each a function of its inputs in the model's graph."""
        return [
            self._of_samples(one) if name in self._reading_samples else one
            for name, one in self.layers.items()
        ]

    def _of_samples(self, layer: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda *values: layer(*map(self._as_computed, values))
