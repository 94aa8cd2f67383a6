"""Models of one's own for tests: built by `own_models:FUNCTION` as a run file names them."""

from __future__ import annotations

import torch
from torch import nn

from weft.capture.block_model import BlockModel

WIDTH = 6
VOCABULARY = 11
SEQUENCE = 5
NOT_A_FUNCTION = 3


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.relu(self.convolution(self.norm(inputs)))


def stem() -> nn.Module:
    return nn.Conv2d(1, WIDTH, 3, padding=1)


def head() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH * 64, 10))


def images() -> BlockModel:
    """Four layers that tell digits apart."""
    return BlockModel([stem, Residual, Residual, head], example=torch.zeros(1, 1, 8, 8), classes=10)


def text() -> BlockModel:
    """Three layers from tokens to logits; every token by itself."""
    layers = [
        lambda: nn.Embedding(VOCABULARY, WIDTH),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        lambda: nn.Linear(WIDTH, VOCABULARY),
    ]
    return BlockModel(layers, example=torch.zeros(1, SEQUENCE, dtype=torch.long), classes=VOCABULARY)


def nothing() -> int:
    return 0


class Shapeless:
    """Has a shape too few."""

    def __init__(self) -> None:
        self.sample_shapes = images().sample_shapes[1:]

    def layer_graph(self) -> object:
        return images().layer_graph()

    def layer(self, index: int) -> nn.Module:
        return images().layer(index)
