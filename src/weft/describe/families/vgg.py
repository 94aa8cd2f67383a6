"""VGG networks: groups of 3 x 3 convolutions with a pool after each group, and three linear layers.

Simonyan and Zisserman, arXiv 1409.1556, without batch norms. A convolution with its activation and the pool
after it is one layer. A linear layer with its activation and dropout is also one layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.families.convolution import (
    ConvolutionWindow,
    Step,
    borders,
    classifier_steps,
    convolutional_graph,
)
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of a VGG network with these sizes."""
    return convolutional_graph(config, _steps(config))


def sample_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shape of one sample at each border of layers; see `borders`."""
    return borders(config, _steps(config))


def convolutions(config: ModelConfig) -> list[tuple[int, bool]]:
    """Return each convolution's channels, and True if a pool follows it."""
    assert config.convolutions is not None, "a VGG network has convolutions"
    return [
        (width, place == depth - 1)
        for width, depth in zip(config.convolutions.widths, config.convolutions.depths, strict=True)
        for place in range(depth)
    ]


def _steps(config: ModelConfig) -> Iterator[Step]:
    windows = ((channels, ConvolutionWindow(3, 1, 1, pooled)) for channels, pooled in convolutions(config))
    return classifier_steps(config, windows, pool=(2, 2), dropout_first=False)
