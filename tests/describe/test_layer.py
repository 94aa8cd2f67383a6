"""Layers: the work of a pass is that of its products, and layers with the same parts are told by these."""

from dataclasses import replace

from weft.describe.amount import Amount, Shape
from weft.describe.layer import Layer, Matmul, PassWork

TOKENS = Amount.of(1, batch=1, sequence=1)
PRODUCT = Matmul(Amount.of(1), TOKENS, Amount.of(8), Amount.of(16))
LAYER = Layer(name="block.0", kind="block", forward=PassWork((PRODUCT,), kernels=3), sent=TOKENS * 16)


def test_flops_are_two_per_multiply_and_add():
    assert LAYER.forward.flops(Shape(2, 4)) == LAYER.flops(Shape(2, 4)) == 2 * (2 * 4) * 8 * 16


def test_layers_that_differ_in_name_alone_have_the_same_parts():
    assert replace(LAYER, name="block.1").parts == LAYER.parts
    assert replace(LAYER, sent=TOKENS * 8).parts != LAYER.parts


def test_every_product_divided_along_its_inner_side_is_one_exchange():
    divided = replace(PRODUCT, inner=Amount.of(8, tensor=1))
    assert LAYER.tensor_exchanges == 1
    assert replace(LAYER, forward=PassWork((PRODUCT, divided, divided))).tensor_exchanges == 2
