"""Residual networks: a wide first convolution, groups of residual blocks, classes from means of maps.

Equal to `transformers.ResNetForImageClassification` (He et al., arXiv 1512.03385; strides of the narrowed
blocks in the 3 x 3 convolution). A residual block is one layer.
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

# A narrowed block divides its channels by this inside.
NARROWED = 4


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a residual network with these sizes."""
    return convolutional_graph(config, _steps(config))


def sample_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shape of one sample at each border of layers; see `borders`."""
    return borders(config, _steps(config))


def group_and_depth(config: ModelConfig, block: int) -> tuple[int, int]:
    """Return the group of a block, and the number of the group's blocks before it."""
    assert config.convolutions is not None, "a residual network has convolutions"
    for group, depth in enumerate(config.convolutions.depths):
        if block < depth:
            return group, block
        block -= depth
    raise IndexError("no such block")


def stride_of(group: int, depth: int) -> int:
    """Return the stride of a block: every group but the first halves the maps in its first block."""
    return 2 if depth == 0 and group > 0 else 1


def _steps(config: ModelConfig) -> Iterator[Step]:
    assert config.convolutions is not None, "a residual network has convolutions"
    work = LayerWork(images(config))
    work.convolution(config.hidden, 7, stride=2, padding=3, bias=False)
    work.batch_norm()
    work.activation()
    work.max_pool(3, stride=2, padding=1)
    yield work.layer("embedding", "embedding", first=True), work.maps
    for index in range(config.layers):
        group, depth = group_and_depth(config, index)
        width = config.convolutions.widths[group]
        maps, work = work.maps, work.following()
        _fill_block(work, width, stride_of(group, depth), bottleneck=config.convolutions.bottleneck)
        yield work.layer(f"block.{index}", kind_of("block", maps, work.maps)), work.maps
    work = work.following()
    work.mean_pool(1)
    work.flatten()
    work.linear(config.vocabulary)
    yield work.layer("head", "head", classifies=True), work.maps


def _fill_block(work: LayerWork, width: int, stride: int, *, bottleneck: bool) -> None:
    """Add a block's convolutions, a batch norm after each, and an activation between two."""
    inside = width // NARROWED
    convolutions = (
        ((inside, 1, 1), (inside, 3, stride), (width, 1, 1))
        if bottleneck
        else ((width, 3, stride), (width, 3, 1))
    )
    maps = work.maps
    for place, (channels, kernel, step) in enumerate(convolutions):
        if place:
            work.activation()
        work.convolution(channels, kernel, stride=step, padding=kernel // 2, bias=False)
        work.batch_norm()
    work.add_shortcut(maps, stride=stride)
    work.activation()
