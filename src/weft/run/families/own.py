"""Stages of a model of one's own: its layers one after the other, each with initial values of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from weft.describe.families.own import own_model
from weft.describe.model import ModelConfig
from weft.run.randomness import counter_seed


class OwnStage(nn.Module):
    """The layers at some positions; parameters are called ``layers.POSITION.NAME`` in any cut."""

    def __init__(self, config: ModelConfig, layers: Sequence[int], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        model = own_model(config.name)
        self._borders = (model.sample_shapes[layers[0]], model.sample_shapes[layers[-1] + 1])
        self.layers = nn.ModuleDict()
        for index in layers:
            # Drawn by position, so that any cut has the same values.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(counter_seed(seed, index))
                self.layers[str(index)] = model.layer(index).to(dtype)

    def layer_functions(self, inputs: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """The layers in their order."""
        first, *others = self.layers.values()
        return [lambda value: first(self._as_computed(value)), *others]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = inputs
        for function in self.layer_functions(inputs):
            value = function(value)
        return value

    def _as_computed(self, inputs: torch.Tensor) -> torch.Tensor:
        # Samples come in one precision, whatever the model computes in.
        weight = next(self.parameters(), inputs)
        return inputs.to(weight.dtype) if inputs.is_floating_point() else inputs

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """None: layers of one's own share nothing."""
        return ()

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[0])

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[1])
