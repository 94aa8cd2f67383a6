"""Stages of a VGG network; parameters are named as torchvision names them (`features.0.weight`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from weft.describe.families.vgg import convolutions, sample_shapes
from weft.describe.model import ModelConfig
from weft.run.stage.families.convolution import ConvolutionalStage, MaskedDropout, as_computed
from weft.run.stage.layers import LayerFunction

# Linear, activation and dropout; so the linear layers are named 0, 3 and 6.
_LINEAR_STEP = 3


class VggStage(ConvolutionalStage):
    """Convolutions with activation and pool, then linear layers with activation and dropout."""

    head = "classifier.6"
    sample_shapes = staticmethod(sample_shapes)

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        assert config.convolutions is not None
        described = convolutions(config)
        shapes = sample_shapes(config)
        self.features, self.classifier = nn.ModuleDict(), nn.ModuleDict()
        self.dropout = MaskedDropout(config.convolutions.dropout)
        self._functions: list[LayerFunction] = []
        pooled = shapes[len(described)][0] * config.convolutions.pooled_size**2
        for layer in layers:
            if layer < len(described):
                channels, pools = described[layer]
                # Every earlier convolution, pool and activation has a number, too.
                number = 2 * layer + sum(pool for _, pool in described[:layer])
                unit = nn.Conv2d(shapes[layer][0], channels, 3, padding=1)
                self.features[str(number)] = unit
                self._functions.append(partial(self._convolve, unit, pools))
            else:
                place = layer - len(described)
                inner = shapes[layer][0] if place else pooled
                linear = nn.Linear(inner, shapes[layer + 1][0])
                self.classifier[str(_LINEAR_STEP * place)] = linear
                is_last = self.ends and layer == layers[-1]
                self._functions.append(partial(self._multiply, linear, place == 0, is_last))

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from pixels, maps (b, channels, size, size) or vectors (b, width) to such or
        logits."""
        return self._functions

    def _convolve(self, unit: nn.Module, pools: bool, maps: torch.Tensor) -> torch.Tensor:
        result = functional.relu(unit(as_computed(maps, unit)), inplace=True)
        return functional.max_pool2d(result, 2) if pools else result

    def _multiply(self, linear: nn.Module, first: bool, last: bool, value: torch.Tensor) -> torch.Tensor:
        if first:
            assert self.config.convolutions is not None
            value = functional.adaptive_avg_pool2d(value, self.config.convolutions.pooled_size).flatten(1)
        result: torch.Tensor = linear(value)
        return result if last else self.dropout(functional.relu(result, inplace=True))
