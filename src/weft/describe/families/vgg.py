"""VGG networks: groups of 3 x 3 convolutions with a pool behind each group, and three linear layers.

Simonyan and Zisserman, arXiv 1409.1556, without batch norms. A convolution with its activation, and the pool
behind it, is one layer; so is a linear layer with its activation and dropout.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def layer_graph(config: ModelConfig) -> LayerGraph:
    """The costed layers of a VGG network of these sizes."""
    return convolutional_graph(config, _steps(config))


def sample_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """See `borders`."""
    return borders(config, _steps(config))


def convolutions(config: ModelConfig) -> list[tuple[int, bool]]:
    """Of every convolution its channels, and whether a pool is behind it."""
    assert config.convolutions is not None, "a VGG network has convolutions"
    return [
        (width, place == depth - 1)
        for width, depth in zip(config.convolutions.widths, config.convolutions.depths, strict=True)
        for place in range(depth)
    ]


def _steps(config: ModelConfig) -> Iterator[Step]:
    assert config.convolutions is not None, "a VGG network has convolutions"
    work = LayerWork(images(config))
    for index, (channels, pooled) in enumerate(convolutions(config)):
        maps = work.maps
        work.convolution(channels, 3, padding=1, bias=True)
        work.activation()
        if pooled:
            work.max_pool(2, stride=2)
        kind = kind_of("convolution", maps, work.maps)
        yield work.layer(f"convolution.{index}", kind, first=index == 0), work.maps
        work = work.following()
    work.mean_pool(config.convolutions.pooled_size)
    work.flatten()
    for index, columns in enumerate((config.feed_forward, config.feed_forward)):
        work.linear(columns)
        work.activation()
        work.dropout()
        yield work.layer(f"linear.{index}", f"linear.{index}"), work.maps
        work = work.following()
    work.linear(config.vocabulary)
    yield work.layer("head", "head", classifies=True), work.maps
