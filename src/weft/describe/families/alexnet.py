"""AlexNet: five convolutions, three of them with a pool behind, and three linear layers.

The sizes of Krizhevsky, arXiv 1404.5997. A convolution with its activation, and the pool behind it, is one
layer; so is a linear layer with the dropout before it and its activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.describe.families.convolution import (
    LayerWork,
    Step,
    borders,
    convolutional_graph,
    images,
    kind_of,
)
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Window:
    """How one convolution moves, and whether a pool of 3 x 3 that moves by 2 is behind it."""

    kernel: int
    stride: int
    padding: int
    pooled: bool


WINDOWS = (
    Window(11, 4, 2, True),
    Window(5, 1, 2, True),
    Window(3, 1, 1, False),
    Window(3, 1, 1, False),
    Window(3, 1, 1, True),
)
POOL, POOL_STRIDE = 3, 2


def layer_graph(config: ModelConfig) -> LayerGraph:
    """The costed layers of an AlexNet of these sizes."""
    return convolutional_graph(config, _steps(config))


def sample_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """See `borders`."""
    return borders(config, _steps(config))


def _steps(config: ModelConfig) -> Iterator[Step]:
    assert config.convolutions is not None, "an AlexNet has convolutions"
    work = LayerWork(images(config))
    for index, (channels, window) in enumerate(zip(config.convolutions.widths, WINDOWS, strict=True)):
        maps = work.maps
        work.convolution(channels, window.kernel, stride=window.stride, padding=window.padding, bias=True)
        work.activation()
        if window.pooled:
            work.max_pool(POOL, stride=POOL_STRIDE)
        kind = kind_of("convolution", maps, work.maps)
        yield work.layer(f"convolution.{index}", kind, first=index == 0), work.maps
        work = work.following()
    work.mean_pool(config.convolutions.pooled_size)
    work.flatten()
    for index in range(2):
        work.dropout()
        work.linear(config.feed_forward)
        work.activation()
        yield work.layer(f"linear.{index}", f"linear.{index}"), work.maps
        work = work.following()
    work.linear(config.vocabulary)
    yield work.layer("head", "head", classifies=True), work.maps
