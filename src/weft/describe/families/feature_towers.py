"""Models of features: towers of linear layers and tables, concatenated, and linear layers to one output.

DLRM (Naumov et al., arXiv 1906.00091) has dense towers, which read vectors, and tables. A sample looks up
rows of each table and adds them up. The interaction is the concatenation. Uno of CANDLE has dense towers
alone. The presets have GraphPipe's sizes (Jeon et al., ASPLOS 2025, arXiv 2406.17145, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.amount import Amount
from weft.describe.families.convolution import LayerWork, Maps
from weft.describe.families.multimodal import towers_of
from weft.describe.families.transformer import TOKEN_BYTES
from weft.describe.layer import Layer, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig

# A sum over looked-up rows keeps their numbers, and three whole numbers of each sample: where its rows begin,
# how many they are, and the row that the largest value would have come from.
_KEPT_OF_A_BAG = 3


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers: dense towers one after the other, tables, the joint layers, the head."""
    towers = towers_of(config)
    layers, ends, edges, inputs = list[Layer](), list[LayerWork](), list[tuple[int, int]](), list[int]()
    last = list[int]()
    for tower, features in enumerate(towers.features):
        inputs.append(len(layers))
        work = LayerWork(Maps(features, flat=True))
        for index in range(towers.depth):
            if index:
                edges.append((len(layers) - 1, len(layers)))
            before = work.maps.channels
            work.linear(config.feed_forward)
            work.activation()
            kind = f"linear.{before}x{config.feed_forward}{'' if index else '.first'}"
            layers.append(work.layer(f"dense.{tower}.linear.{index}", kind, first=index == 0))
            work = work.following()
        ends.append(work)
        last.append(len(layers) - 1)
    for table, rows in enumerate(towers.tables):
        inputs.append(len(layers))
        last.append(len(layers))
        layers.append(_table(config, f"table.{table}", rows))
        ends.append(LayerWork(Maps(config.hidden, flat=True)))
    edges += [(end, len(layers)) for end in last]
    for layer in _joint(config, ends):
        layers.append(layer)
    edges += [(layer, layer + 1) for layer in range(last[-1] + 1, len(layers) - 1)]
    return LayerGraph(
        name=config.name,
        layers=tuple(layers),
        edges=tuple(sorted(edges)),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        inputs=tuple(enumerate(inputs)),
    )


def _joint(config: ModelConfig, ends: list[LayerWork]) -> Iterator[Layer]:
    """Yield the linear layers behind the towers, the first of which concatenates them, and the head."""
    work = LayerWork.joined(ends)
    for index in range(towers_of(config).joint_depth):
        before = work.maps.channels
        work.linear(config.feed_forward)
        work.activation()
        kind = f"linear.{before}x{config.feed_forward}{'' if index else '.joint'}"
        yield work.layer(f"joint.{index}", kind)
        work = work.following()
    # The loss of one number costs as cross entropy of one class.
    work.linear(config.vocabulary)
    yield work.layer("head", "head", classifies=True)


def _table(config: ModelConfig, name: str, rows: int) -> Layer:
    """Build a table, of which backward keeps the numbers of the rows that were looked up.

    It fills a gradient as large as the table, scatters into it and adds it to the accumulated gradient.
    """
    width, looked_up = config.hidden, towers_of(config).looked_up
    parameters = Amount.of(rows * width)
    lookups = Amount.of((looked_up + 1.0) * width, batch=1)
    return Layer(
        name=name,
        kind=f"table.{rows}",
        parameters=parameters,
        forward=PassWork(memory=lookups, kernels=1),
        backward_weight=PassWork(memory=lookups + 4.0 * parameters, kernels=3),
        kept_bytes=Amount.of(TOKEN_BYTES * (looked_up + _KEPT_OF_A_BAG), batch=1),
        temporaries=(Temporaries(elements=Amount.of(width, batch=1), weights=parameters),),
        sent=Amount.of(width, batch=1),
    )
