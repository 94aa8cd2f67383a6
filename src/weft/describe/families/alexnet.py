"""AlexNet: five convolutions, three of them followed by a pool, and three linear layers.

The sizes are from Krizhevsky, arXiv 1404.5997. A convolution with its activation and the pool after it is one
layer. A linear layer with the dropout before it and its activation is also one layer.
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

POOL, POOL_STRIDE = 3, 2
WINDOWS = (
    ConvolutionWindow(11, 4, 2, True),
    ConvolutionWindow(5, 1, 2, True),
    ConvolutionWindow(3, 1, 1, False),
    ConvolutionWindow(3, 1, 1, False),
    ConvolutionWindow(3, 1, 1, True),
)


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of an AlexNet with these sizes."""
    return convolutional_graph(config, _steps(config))


def sample_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shape of one sample at each border of layers; see `borders`."""
    return borders(config, _steps(config))


def _steps(config: ModelConfig) -> Iterator[Step]:
    assert config.convolutions is not None, "an AlexNet has convolutions"
    windows = zip(config.convolutions.widths, WINDOWS, strict=True)
    return classifier_steps(config, windows, pool=(POOL, POOL_STRIDE), dropout_first=True)
