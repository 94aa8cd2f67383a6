"""Frozen linear layers in few bits: their bytes, and the work to unpack them before each product.

Blocks of 64 weights have a scale in fp32 (Dettmers et al., QLoRA, arXiv 2305.14314, section 3, without the
second quantisation). Each product with a weight unpacks it to the compute precision and drops the result.
Backward passes unpack it again for the gradient of the operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.describe.amount import ZERO, Amount
from weft.describe.block_products import BlockProduct
from weft.describe.layer import Layer, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph
from weft.methods.lora.options import Base

BLOCK = 64
_SCALE_BITS = 32
# Weights that are unpacked at once, so that temporaries stay small beside a large weight.
_AT_ONCE = 1 << 22


class Format(NamedTuple):
    """A type of packed weights: its bits, and the kernels and bytes moved that unpack one weight."""

    bits: int
    kernels: int
    moved_bytes: float

    @property
    def bytes(self) -> float:
        """Return the bytes of one weight, with its part of a scale."""
        return (self.bits + _SCALE_BITS / BLOCK) / 8


# NF4: a byte becomes an index in int32, the index two values in fp32, and these are scaled. Integers are
# scaled at once. Results are counted with 16 bits.
FORMATS: Mapping[Base, Format] = {"nf4": Format(4, 3, 14.5), "int8": Format(8, 1, 3.0)}
_ELEMENT_BYTES = 2


def rows_at_once(inner: int) -> int:
    """Return the rows of a weight, each with `inner` elements, that are unpacked at once."""
    return max(1, _AT_ONCE // inner)


def with_few_bits(block: Layer, products: Sequence[BlockProduct], base: Base) -> Layer:
    """Return a frozen block with its linear layers in few bits.

    Passes that keep the results of products for recomputation are priced as if they unpacked once more.
    """
    form = FORMATS[base]
    packed = sum((_weights(one) for one in products), ZERO)
    kernels = form.kernels * sum(-(-one.columns // rows_at_once(one.inner)) for one in products)
    unpacking = PassWork((), form.moved_bytes / _ELEMENT_BYTES * packed, kernels)
    largest = _weights(max(products, key=lambda one: one.inner * one.columns))
    moments = block.temporaries or (Temporaries(),)
    return replace(
        block,
        packed=packed,
        packed_bytes=form.bytes * sum((_in_blocks(one) for one in products), ZERO),
        forward=_with(unpacking, block.forward),
        backward_input=_with(unpacking, block.backward_input),
        temporaries=tuple(replace(one, elements=one.elements + largest) for one in moments),
    )


def divided_in_blocks(graph: LayerGraph, products: Sequence[BlockProduct]) -> LayerGraph:
    """Return the model with the condition that shares of tensor ranks end where blocks of weights end."""
    sizes = {one.inner: one.name for one in products if one.divided == "inner"}
    blocks = ((f"blocks of {BLOCK} of {name}", _whole_blocks(inner)) for inner, name in sizes.items())
    return replace(graph, divided=(*graph.divided, *blocks)) if graph.divided else graph


def _whole_blocks(inner: int) -> int:
    return inner // BLOCK if inner % BLOCK == 0 else 1


def _weights(product: BlockProduct) -> Amount:
    return Amount.of(product.inner * product.columns, tensor=1)


def _in_blocks(product: BlockProduct) -> Amount:
    """Return the weights with those that fill up the last block of each row."""
    return Amount.of(-(-product.inner // BLOCK) * BLOCK * product.columns, tensor=1)


def _with(more: PassWork, work: PassWork) -> PassWork:
    return replace(work, memory=work.memory + more.memory, kernels=work.kernels + more.kernels)
