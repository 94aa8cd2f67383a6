"""Models of one's own for tests: built by `own_models:FUNCTION` as a run file names them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from weft.capture.block_model import BlockModel
from weft.capture.graphs.captured import CapturedModel

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


class Mixer(nn.Module):
    """Linear layers that read one tensor, or its other axis, are called twice, are frozen, or not called."""

    def __init__(self) -> None:
        super().__init__()
        self.uncalled = nn.Linear(WIDTH, WIDTH)
        self.tokens = nn.Linear(SEQUENCE, SEQUENCE, bias=False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.keys, self.queries = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        keys = self.keys(inputs)
        mixed = self.tokens(inputs.transpose(1, 2)).transpose(1, 2)
        scores = torch.softmax(self.queries(inputs) @ keys.transpose(1, 2), -1)
        values = nn.functional.linear(self.frozen(inputs), self.uncalled.weight, self.uncalled.bias)
        return inputs + self.twice(torch.tanh(self.twice(mixed))) + scores @ values


def mixed() -> BlockModel:
    """Four layers from tokens to logits, two of which mix a sample's tokens."""
    layers = [
        lambda: nn.Embedding(VOCABULARY, WIDTH),
        Mixer,
        Mixer,
        lambda: nn.Linear(WIDTH, VOCABULARY),
    ]
    return BlockModel(layers, example=torch.zeros(1, SEQUENCE, dtype=torch.long), classes=VOCABULARY)


class Halves(nn.Module):
    """One half of the channels of what it reads, blurred or not."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.convolution = nn.Conv2d(WIDTH // 2, WIDTH, 3, padding=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        half = inputs[:, : WIDTH // 2] if self.first else inputs[:, WIDTH // 2 :]
        return torch.tanh(self.convolution(half))


class Join(nn.Module):
    """Tells digits apart from all that it reads."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(inputs * WIDTH * 64, 10)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([one.flatten(1) for one in inputs], dim=1))


def diamond() -> BlockModel:
    """A stem, two towers of two layers and one of none, and a layer that joins them."""
    layers = [stem, partial(Halves, True), Residual, partial(Halves, False), Residual, partial(Join, 3)]
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (0, 5), (2, 5), (4, 5)]
    return BlockModel(layers, edges=edges, example=torch.zeros(1, 1, 8, 8), classes=10)


def interleaved() -> BlockModel:
    """A stem, two towers whose layers take turns in the order of the model, and a layer that joins them."""
    layers = [stem, partial(Halves, True), partial(Halves, False), Residual, Residual, partial(Join, 2)]
    edges = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    return BlockModel(layers, edges=edges, example=torch.zeros(1, 1, 8, 8), classes=10)


def two_stems() -> BlockModel:
    """Two towers that each read the samples, one of which reads the other, and a layer that joins them."""
    layers = [stem, Residual, stem, partial(Sum, 2), partial(Join, 2)]
    edges = [(0, 1), (0, 3), (2, 3), (1, 4), (3, 4)]
    return BlockModel(layers, edges=edges, example=torch.zeros(1, 1, 8, 8), classes=10)


class Conditioned(nn.Module):
    """Maps scaled by a vector that the sample has beside its image."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Linear(3, WIDTH)

    def forward(self, vector: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
        return torch.tanh(maps * self.scales(vector)[:, :, None, None])


def conditioned() -> BlockModel:
    """A chain that reads an image, and in its third layer a vector, too."""
    return BlockModel(
        [stem, Residual, Conditioned, head],
        example=(torch.zeros(1, 1, 8, 8), torch.zeros(1, 3)),
        inputs=[(0, 0), (1, 2)],
        classes=10,
    )


def unread() -> BlockModel:
    """Of its three layers nobody reads the second."""
    return BlockModel(
        [stem, Residual, head], edges=[(0, 1), (0, 2)], example=torch.zeros(1, 1, 8, 8), classes=10
    )


class Sum(nn.Module):
    """A convolution of a sum."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.convolution = stem_of(WIDTH)
        self.weights = nn.Parameter(torch.ones(inputs))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.convolution(sum(weight * one for weight, one in zip(self.weights, inputs, strict=True)))


def stem_of(channels: int) -> nn.Module:
    return nn.Conv2d(channels, WIDTH, 3, padding=1)


def of_one_layer(make: Callable[[], nn.Module]) -> BlockModel:
    """A layer that reads four numbers."""
    return BlockModel([make, lambda: nn.Tanh()], example=torch.zeros(1, 4), classes=4)


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


class Branches(nn.Module):
    """A stem, two branches of its halves, one of which works in place, and a head on both and the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.narrow = nn.Conv2d(WIDTH // 2, WIDTH, 3, padding=1)
        self.wide = nn.Sequential(
            nn.Conv2d(WIDTH // 2, WIDTH, 1), nn.ReLU(inplace=True), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        )
        self.head = nn.Linear(3 * WIDTH * 64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = torch.tanh(self.stem(images))
        first, second = maps.chunk(2, 1)
        return self.head(torch.cat([self.narrow(first), self.wide(second), maps], 1).flatten(1))


class Tied(nn.Module):
    """Tokens, positions and a head with the weights of the token table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        value = self.tokens(tokens) + positions
        for inner in self.inner:
            value = value + inner(value) * positions
        return self.head(self.norm(value))


def branches() -> tuple[nn.Module, torch.Tensor]:
    return Branches(), torch.zeros(1, 1, 8, 8)


def tied() -> tuple[nn.Module, torch.Tensor]:
    return Tied(), torch.zeros(1, SEQUENCE, dtype=torch.long)


def captured_branches() -> CapturedModel:
    """Leaf modules that form a graph; two of them have no parameters."""
    return CapturedModel(*branches(), level="module")


def captured_tied() -> CapturedModel:
    """A graph of operators, with parameters that several of them use."""
    return CapturedModel(*tied(), level="operator")


class WithoutSamples:
    """Has all that plans and training need of a model, and no samples."""

    def __init__(self) -> None:
        self.sample_shapes, self.layer, self.layer_graph = (
            images().sample_shapes,
            images().layer,
            images().layer_graph,
        )


def without_samples() -> WithoutSamples:
    return WithoutSamples()
