"""Stages of an AlexNet; parameters are named as torchvision names them (`classifier.6.bias`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from weft.describe.families.alexnet import POOL, POOL_STRIDE, WINDOWS, sample_shapes
from weft.describe.model import ModelConfig
from weft.run.stage.families.convolution import ConvolutionalStage, MaskedDropout, as_computed
from weft.run.stage.layers import LayerFunction

# Indices of the layers with weights in torchvision's lists, which count activations, pools and dropouts.
FEATURES = (0, 3, 6, 8, 10)
CLASSIFIER = (1, 4, 6)


class AlexNetStage(ConvolutionalStage):
    """Convolutions with activation and pool, then linear layers with dropout before them."""

    head = "classifier.6"
    sample_shapes = staticmethod(sample_shapes)

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        assert config.convolutions is not None
        shapes = sample_shapes(config)
        self.features, self.classifier = nn.ModuleDict(), nn.ModuleDict()
        self.dropout = MaskedDropout(config.convolutions.dropout)
        self._functions: list[LayerFunction] = []
        pooled = shapes[len(WINDOWS)][0] * config.convolutions.pooled_size**2
        for layer in layers:
            if layer < len(WINDOWS):
                window = WINDOWS[layer]
                unit = nn.Conv2d(
                    shapes[layer][0],
                    config.convolutions.widths[layer],
                    window.kernel,
                    stride=window.stride,
                    padding=window.padding,
                )
                self.features[str(FEATURES[layer])] = unit
                self._functions.append(partial(self._convolve, unit, window.pooled))
            else:
                place = layer - len(WINDOWS)
                inner = shapes[layer][0] if place else pooled
                linear = nn.Linear(inner, shapes[layer + 1][0])
                self.classifier[str(CLASSIFIER[place])] = linear
                self._functions.append(partial(self._multiply, linear, place))

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from pixels, maps (b, channels, size, size) or vectors (b, width) to such or
        logits."""
        return self._functions

    def _convolve(self, unit: nn.Module, pools: bool, maps: torch.Tensor) -> torch.Tensor:
        result = functional.relu(unit(as_computed(maps, unit)), inplace=True)
        return functional.max_pool2d(result, POOL, POOL_STRIDE) if pools else result

    def _multiply(self, linear: nn.Module, place: int, value: torch.Tensor) -> torch.Tensor:
        if place == 0:
            assert self.config.convolutions is not None
            value = functional.adaptive_avg_pool2d(value, self.config.convolutions.pooled_size).flatten(1)
        if place == len(CLASSIFIER) - 1:
            result: torch.Tensor = linear(value)
            return result
        return functional.relu(linear(self.dropout(value)), inplace=True)
