"""Laws: the pieces of a layer are all of it, and borders are where its tensor ranks exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.describe.amount import ZERO, Shape
from weft.describe.families import layer_graph
from weft.describe.layer_pieces import cut_of
from weft.describe.models import resolve_model

MODELS = ["gpt-1m", "llama-1m", "bert-large", "vit-base"]
SHAPES = [Shape(2, 64, 2), Shape(3, 63, 2), Shape(1, 128, 4)]
PASSES = ("forward", "backward_input", "backward_weight")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_pieces_add_up_to_their_layer(model: str, shape: Shape) -> None:
    for layer in layer_graph(resolve_model(model)).layers:
        pieces = cut_of(layer).pieces
        for name in PASSES:
            whole, parts = getattr(layer, name), [getattr(piece, name) for piece in pieces]
            assert sum(part.flops(shape) for part in parts) == pytest.approx(whole.flops(shape))
            assert sum(part.memory(shape) for part in parts) == pytest.approx(whole.memory(shape))
            assert sum(part.kernels for part in parts) == whole.kernels


@pytest.mark.parametrize("model", MODELS)
def test_a_block_enters_and_leaves_two_regions(model: str) -> None:
    cut = cut_of(layer_graph(resolve_model(model)).layers[1])
    assert [border.enters for border in cut.borders] == [True, False, True, False]
    assert [piece.divided for piece in cut.pieces] == [False, True, False, True, False]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", ["gpt-1m", "llama-1m", "bert-large"])
def test_what_crosses_borders_is_what_ranks_reduce_but_the_loss(model: str, shape: Shape) -> None:
    graph = layer_graph(resolve_model(model))
    for layer in graph.layers:
        crossing = sum(border.elements(shape) for border in cut_of(layer).borders)
        # A loss adds its maximum, its sum and the target's logit of every token.
        loss = 3.0 * shape.micro_batch_size * shape.sequence if layer.kind == "head" else 0.0
        # In both passes; what crosses a border once all-reduces, or is half of an all-reduce in each.
        assert crossing == pytest.approx(2.0 * (layer.tensor_reduced(shape) - loss))


def test_a_layer_that_nobody_divides_is_one_piece() -> None:
    block = layer_graph(resolve_model("gpt-1m")).layers[1]
    alone = cut_of(replace(block, tensor_reduced=ZERO))
    assert alone.borders == ()
    assert [piece.forward for piece in alone.pieces] == [block.forward]
