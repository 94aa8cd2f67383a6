"""Other kernels: the same model, the same products, other time and memory; formulas of the literature."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.kernels import Attention, Kernels, Norm, with_kernels
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.predict.cost.memory import stage_kept_bytes

EVERY = [
    Kernels(attention=attention, norm=norm, sequence_parallel=divided, loss_parallel=shared)
    for attention, norm, divided, shared in product(
        get_args(Attention), get_args(Norm), (True, False), (True, False)
    )
]
EVERY.append(Kernels(accumulation="fused"))
GPT, LLAMA = resolve_model("gpt2"), resolve_model("llama-7b")


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=lambda one: one.family)
@pytest.mark.parametrize("kernels", EVERY, ids=str)
def test_parameters_and_products_stay_and_files_keep_everything(config, kernels):
    own = layer_graph(config)
    graph = with_kernels(own, config, kernels)
    for shape in (Shape(1, 512), Shape(2, 1024, 4)):
        for before, after in zip(own.layers, graph.layers, strict=True):
            assert after.flops(shape) == before.flops(shape)
            assert after.parameters(shape) == before.parameters(shape)
            assert after.kept(shape) >= 0
            assert after.kept_bytes(shape) >= 0
            assert after.products is not None
            assert after.products(shape) <= after.kept(shape)
    assert LayerGraph.from_json(graph.to_json()) == graph


def test_one_rank_divides_nothing():
    for divided, shared in product((True, False), repeat=2):
        kernels = Kernels(sequence_parallel=divided, loss_parallel=shared)
        graph = with_kernels(layer_graph(GPT), GPT, kernels)
        shape = Shape(2, 1024)
        assert stage_kept_bytes(graph, range(len(graph.layers)), shape, "bf16") == stage_kept_bytes(
            layer_graph(GPT), range(len(graph.layers)), shape, "bf16"
        )


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("divided", [True, False])
def test_a_block_of_gpt_keeps_what_korthikanti_et_al_say(tensor_parallel, divided):
    """Section 4 and table 2 of arXiv 2205.05198, without the masks of dropout: 2 sbh and as^2b bytes."""
    config = resolve_model("gpt3-175b")
    s, b, h, a, t = 2048, 1, config.hidden, config.heads, tensor_parallel
    kernels = Kernels(attention="fused", sequence_parallel=divided)
    graph = with_kernels(layer_graph(config), config, kernels)
    kept = stage_kept_bytes(graph, (1,), Shape(b, s, t), "fp16")
    stream = 10 - 2
    expected = s * b * h * (stream / (t if divided else 1) + 24 / t + 4 * a * s / (h * t))
    assert kept == pytest.approx(expected, rel=2e-3)


def test_a_fused_norm_keeps_four_hidden_states_and_an_unfused_one_sixteen_bytes_more():
    shape = Shape(1, 2048)
    kept = {
        norm: stage_kept_bytes(
            with_kernels(layer_graph(LLAMA), LLAMA, Kernels(norm=norm)), (1,), shape, "bf16"
        )
        for norm in get_args(Norm)
    }
    s, h, f, a = 2048, LLAMA.hidden, LLAMA.feed_forward, LLAMA.heads
    assert kept["fused"] == pytest.approx(s * (2 * (4 * h + 4 * h + 4 * f) + 4 * a), rel=2e-3)
    assert kept["unfused"] - kept["fused"] == pytest.approx(2 * 8 * s * h, rel=2e-3)


def test_scores_that_are_stored_are_made_again_selectively_and_nothing_else():
    shape = Shape(1, 1024)
    block = with_kernels(layer_graph(GPT), GPT, Kernels(attention="math")).layers[1]
    assert block.again is not None
    attention = sum(m.flops(shape) for m in block.forward.matmuls if m.kernel == "scores")
    assert block.again.flops(shape) == attention
    scores = GPT.heads * shape.sequence**2
    assert block.kept_bytes(shape) - block.product_bytes(shape) == pytest.approx(8.0 * scores)


def test_gradients_that_products_add_up_move_nothing_of_their_own():
    shape = Shape(1, 2048)
    own = layer_graph(LLAMA)
    fused = with_kernels(own, LLAMA, Kernels(accumulation="fused"))
    for before, after in zip(own.layers, fused.layers, strict=True):
        moved = before.backward_weight.memory(shape)
        if before.kind == "embedding":
            assert after.backward_weight == before.backward_weight
        else:
            assert moved == 3 * before.parameters(shape)
            assert after.backward_weight.memory(shape) == 0
            assert after.backward_weight.kernels == len(before.backward_weight.matmuls)
