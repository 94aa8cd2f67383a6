"""The common part of stages of convolutional networks: shapes between layers, initial values, dropout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_layers import HeldByTensorRanks
from weft.run.stage.stage_module import Initial, StageModule

HEAD_DEVIATION = 0.01


class ConvolutionalStage(StageModule):
    """The first stage reads pixels (b, channels, size, size), the last one returns logits (b, classes).

    Initial weights follow He et al. (arXiv 1502.01852), the last layer's are small. Biases begin at 0.
    """

    held = MappingProxyType[str, HeldByTensorRanks]({})
    regions = ()
    region_ends = ()
    # The name of the last linear layer.
    head: ClassVar[str]

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        shapes = type(self).sample_shapes(config)
        self._borders = (shapes[layers[0]], shapes[layers[-1] + 1])

    @staticmethod
    @abstractmethod
    def sample_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
        """Return the shapes of one sample's values: before each layer, and after the last."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Empty: tensor ranks cannot divide these families."""
        return ()

    def initial(self, name: str) -> Initial:
        weight = self.get_parameter(name)
        if "normalization" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        if weight.dim() == 1:
            return Initial()
        if weight.dim() == 2:
            is_head = name == f"{self.head}.weight"
            return Initial(deviation=HEAD_DEVIATION if is_head else (2.0 / weight.shape[1]) ** 0.5)
        outputs = weight.shape[0] * weight.shape[2] * weight.shape[3]
        return Initial(deviation=(2.0 / outputs) ** 0.5)

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[0])

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (micro_batch_size, *self._borders[1])


class MaskedDropout(nn.Dropout):
    """Dropout that keeps a byte for every element, on any device."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = torch.native_dropout(inputs, self.p, self.training)[0]
        return dropped


def as_computed(pixels: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Cast pixels, which come in one precision, to the precision of the module."""
    return pixels.to(next(module.parameters()).dtype)
