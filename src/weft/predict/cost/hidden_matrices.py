"""The matrices of hidden layers, which an optimizer may orthogonalise: their number, sizes and seconds.

They are the weights of a block's products. Joint products of queries, keys and values, and of gates, count
as one matrix each. Shared experts are part of the products of all experts, and count as no matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from weft.describe.amount import Amount, Shape
from weft.describe.device import Device
from weft.describe.layer import Layer, Matmul
from weft.describe.optimizers import OptimizerWork

if TYPE_CHECKING:
    from weft.predict.cost.layer_times import Speeds

BLOCK = "block"
# The precision of the iterations on accelerators, which step in fp32; others keep the step's.
ITERATES_IN = "bf16"


class Matrices(NamedTuple):
    """Equal matrices: their number, and the sides of each."""

    number: int
    rows: float
    columns: float

    def flops(self, iterations: int) -> float:
        """Return the operations of iterations by Newton and Schulz: three products each."""
        short, long = sorted((self.rows, self.columns))
        return self.number * iterations * (4.0 * short**2 * long + 2.0 * short**3)


def hidden_matrices(layer: Layer, shape: Shape) -> list[Matrices]:
    """Return the matrices that a rank trains in a layer; none outside of blocks."""
    return list(_found(layer, shape)) if layer.kind == BLOCK else []


def matrix_parameters(layer: Layer, shape: Shape) -> int:
    """Return the count of parameters in a layer's hidden matrices."""
    return round(sum(one.number * one.rows * one.columns for one in hidden_matrices(layer, shape)))


def orthogonalise_s(
    layer: Layer, shape: Shape, precision: str, device: Device, speeds: Speeds, optimizer: OptimizerWork
) -> float:
    """Return the seconds in which one device orthogonalises the updates of all matrices of a layer."""
    iterations = optimizer.orthogonalisations
    if not iterations:
        return 0.0
    computed = ITERATES_IN if not device.synchronous and ITERATES_IN in speeds.precisions else precision
    found = hidden_matrices(layer, shape)
    return sum(speeds.matmul_s(one.flops(iterations), computed) for one in found)


def _found(layer: Layer, shape: Shape) -> Iterator[Matrices]:
    routed = {_sides(matmul.rows, matmul.inner, matmul.columns) for matmul in layer.routed}
    for matmul in layer.backward_weight.matmuls:
        if _sides(matmul.inner, matmul.rows, matmul.columns) not in routed:
            yield Matrices(1, matmul.rows(shape), matmul.columns(shape))
    own = Amount(tuple(term for term in layer.parameters.terms if term.expert))
    each = sum(_elements(matmul, shape) for matmul in layer.routed)
    if each:
        experts = int(own(shape) // each)
        for matmul in layer.routed:
            yield Matrices(experts, matmul.inner(shape), matmul.columns(shape))


def _sides(tokens: Amount, inner: Amount, columns: Amount) -> tuple[Amount, Amount, Amount]:
    return tokens, inner, columns


def _elements(matmul: Matmul, shape: Shape) -> float:
    return matmul.inner(shape) * matmul.columns(shape)
