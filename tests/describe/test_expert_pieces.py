"""Pieces of a layer around its experts have the work of the layer."""

from __future__ import annotations

import pytest
from methods.rows.expert_exchanges import MIXTRAL, SHARED_EXPERTS

from weft.describe.amount import Shape
from weft.describe.expert_pieces import expert_pieces
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig

SHAPE = Shape(micro_batch_size=4, sequence=8, expert_parallel=2)


@pytest.mark.parametrize("config", [MIXTRAL, SHARED_EXPERTS], ids=["mixtral", "qwen2_moe"])
def test_pieces_of_a_layer_have_its_work(config: ModelConfig) -> None:
    for layer in layer_graph(config).layers:
        pieces = expert_pieces(layer)
        assert len(pieces) == (3 if layer.dispatched.terms else 1)
        for name in ("forward", "backward_input", "backward_weight"):
            whole, each = getattr(layer, name), [getattr(one, name) for one in pieces]
            assert sum(one.flops(SHAPE) for one in each) == pytest.approx(whole.flops(SHAPE))
            assert sum(one.memory(SHAPE) for one in each) == pytest.approx(whole.memory(SHAPE))
            assert sum(one.kernels for one in each) >= whole.kernels


def test_experts_compute_what_tokens_choose_and_shared_ones_before_them() -> None:
    [layer] = [one for one in layer_graph(SHARED_EXPERTS).layers if one.routed]
    before, inside, behind = (one.forward for one in expert_pieces(layer))
    routed = sum(one.flops(SHAPE) for one in layer.routed)
    assert inside.flops(SHAPE) == pytest.approx(layer.routed_share * routed)
    assert before.flops(SHAPE) == pytest.approx(layer.forward.flops(SHAPE) - layer.routed_share * routed)
    assert behind.flops(SHAPE) == 0.0
