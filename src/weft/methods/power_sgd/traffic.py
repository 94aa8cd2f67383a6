"""The elements that replicas send for a stage's gradient, as far as a model's graph tells.

A graph has the sides of the matrices that layers multiply tokens with. It joins the products of one input,
such as those of queries, keys and values. A model may hold these as several matrices. The parameters of a
layer without products count as one table, with rows as wide as the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import SyncMethod, Wire
from weft.methods.power_sgd.options import NAME, PowerSgdOptions
from weft.predict.cost.memory import own_parameters, shared_parameters

# Bytes read and written by a reduction, in gradients: 3 to add the error, 1 for each of both products with
# the sum, 2 to subtract the sent part, 1 to decode, 1 to look for numbers that are not finite, 3 to keep the
# new error or the old one.
_PASSES = 12.0


class MatrixSides(NamedTuple):
    """The sides of a matrix of parameters on one tensor rank."""

    rows: int
    columns: int


def matrices_of(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> Iterator[MatrixSides]:
    """Yield the matrices of a stage's own parameters, without tied ones that other stages use."""
    tied = {one.layers[0]: one.parameters(shape) for one in shared_parameters(graph, layers)}
    for index in layers:
        layer = graph.layers[index]
        left = layer.parameters(shape) - tied.get(index, 0.0)
        products = layer.backward_weight.matmuls
        for one in products:
            sides = MatrixSides(round(one.rows(shape)), round(one.columns(shape)))
            # A head with tied embeddings multiplies with the matrix of another layer.
            if sides.rows * sides.columns <= left:
                left -= sides.rows * sides.columns
                yield sides
        tokens = Shape(1, graph.sequence)
        width = 0 if products else round(layer.sent(tokens) / graph.sequence)
        if width:
            yield MatrixSides(round(left / width), width)


def sent_elements(options: PowerSgdOptions, graph: LayerGraph, layers: Sequence[int], shape: Shape) -> int:
    """Return the elements of one rank's messages for a stage's gradient."""
    sent = own_parameters(graph, layers, shape)
    for rows, columns in matrices_of(graph, layers, shape):
        rank = options.rank_of(rows, columns)
        sent -= rows * columns - rank * (rows + columns) if rank else 0
    return sent


def _sent_share(options: PowerSgdOptions, plan: Plan, graph: LayerGraph, stage: int) -> float:
    layers, shape = plan.stages[stage].layers, plan.shape(stage)
    whole = own_parameters(graph, layers, shape)
    return sent_elements(options, graph, layers, shape) / whole if whole else 1.0


def _wire(options: PowerSgdOptions, plan: Plan) -> Wire:
    """Two sums, one after the other; a replica with sharded states gets them whole, too."""
    sides = 1.0 if plan.sharding == "zero-0" else 2.0
    return Wire(inside=sides, between=sides, passes=_PASSES * plan.sharers(0), rounds=2)


SYNC = SyncMethod(
    name=NAME,
    table=PowerSgdOptions,
    wire=_wire,
    sent_share=_sent_share,
    proposals=lambda job: [{}, {"rank": 16}, {"rank": 64}],
)
