"""Laws: packed weights are near the given ones, have their priced bytes, and are not kept for gradients."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from asked_methods import with_low_rank
from decoder_models import tiny_decoder
from hypothesis import given
from hypothesis import strategies as st
from small_plans import tiny

from weft.describe.added_layers import trained_graph
from weft.describe.amount import Shape
from weft.describe.model import ModelConfig
from weft.methods.lora.few_bits import BLOCK, FORMATS
from weft.methods.lora.options import Base
from weft.methods.lora.runtime import few_bits
from weft.methods.lora.runtime.few_bits import PackedWeight, normal_values
from weft.run.stage.build import build_stage
from weft.run.stage.stage_module import rest

BASES: tuple[Base, ...] = get_args(Base)
# Dettmers et al., arXiv 2305.14314, appendix E.
PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
# The largest part of a block's scale by which a weight moves: half the widest gap between two values.
MOVES = {"nf4": (1.0 - 0.6961928) / 2, "int8": 0.5 / 127}


def random_weight(columns: int, inner: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(columns, inner, generator=torch.Generator().manual_seed(seed))


def test_the_values_are_those_of_the_paper() -> None:
    assert normal_values() == pytest.approx(PUBLISHED, abs=2e-7)


@pytest.mark.parametrize("base", BASES)
@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 99), st.sampled_from([1e-20, 1.0, 1e20]))
def test_a_weight_moves_by_a_part_of_its_scale(
    base: Base, columns: int, inner: int, seed: int, size: float
) -> None:
    weight = size * random_weight(columns, inner, seed)
    weight[0] = 0.0
    unpacked = PackedWeight(weight, base).unpacked(torch.float32)
    assert not unpacked[0].any()
    for first in range(0, inner, BLOCK):
        block, near = weight[:, first : first + BLOCK], unpacked[:, first : first + BLOCK]
        scales = block.abs().amax(1, keepdim=True)
        assert ((near - block).abs() <= MOVES[base] * 1.0001 * scales).all()
        assert (near.abs() <= 1.000001 * scales).all()


@pytest.mark.parametrize("base", BASES)
def test_packing_again_changes_nothing(base: Base) -> None:
    once = PackedWeight(random_weight(7, 130), base).unpacked(torch.float32)
    assert torch.allclose(PackedWeight(once, base).unpacked(torch.float32), once, rtol=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_shares_of_whole_blocks_and_chunks_of_rows_are_packed_alike(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(6, 4 * BLOCK)
    whole = PackedWeight(weight, base).unpacked(torch.bfloat16)
    shares = [PackedWeight(one, base).unpacked(torch.bfloat16) for one in weight.chunk(2, 1)]
    assert torch.equal(torch.cat(shares, 1), whole)
    monkeypatch.setattr(few_bits, "rows_at_once", lambda inner: 4)
    assert torch.equal(PackedWeight(weight, base).unpacked(torch.bfloat16), whole)


@pytest.mark.parametrize("base", BASES)
def test_a_product_and_its_gradient_are_those_of_the_unpacked_weight(base: Base) -> None:
    packed = PackedWeight(random_weight(5, 70).double(), base)
    values, plain = (random_weight(3, 70, seed=1).double().requires_grad_() for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        result = packed(values)
    assert not saved
    expected = plain @ packed.unpacked(torch.float64).T
    assert torch.equal(result, expected)
    result.sin().sum().backward()
    expected.sin().sum().backward()
    assert torch.equal(values.grad, plain.grad)


@pytest.mark.parametrize("base", BASES)
def test_packed_weights_have_the_bytes_of_their_format(base: Base) -> None:
    packed = PackedWeight(random_weight(6, 2 * BLOCK), base)
    assert packed.codes.nbytes + packed.scales.nbytes == FORMATS[base].bytes * 12 * BLOCK


def wide(family: str) -> ModelConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return tiny_decoder(family, **sizes)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "olmo2"])
def test_a_stage_holds_the_frozen_bytes_that_its_layers_say(family: str, base: Base) -> None:
    config, choice = wide(family), with_low_rank(4, 8.0, base=base)
    graph = trained_graph(config, [choice])
    stage = build_stage(config, range(config.layers + 2), 3, torch.float32, methods=[choice])
    rest(stage, torch.bfloat16)
    rest(stage, torch.bfloat16)
    packed = [one for one in stage.modules() if isinstance(one, PackedWeight)]
    held = sum(one.codes.nbytes + one.scales.nbytes for one in packed)
    held += sum(one.nbytes for one in stage.parameters() if not one.requires_grad)
    shape = Shape(1, config.sequence)
    assert held == sum(layer.frozen_bytes(shape, element_bytes=2) for layer in graph.layers)
    trained = [one for one in stage.parameters() if one.requires_grad]
    assert {one.dtype for one in trained} == {torch.float32}
    assert sum(one.numel() for one in trained) == graph.trained_parameters()


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_packed_stage_is_near_the_plain_one(family: str) -> None:
    config = tiny("gpt", layers=2) if family == "gpt" else wide(family)
    ids = torch.arange(2 * config.sequence).view(2, -1) % config.vocabulary
    outputs = []
    for base in (None, *BASES):
        choice = with_low_rank(4, 8.0, base=base)
        stage = build_stage(config, range(config.layers + 2), 3, torch.float32, methods=[choice]).eval()
        rest(stage, torch.float32)
        outputs.append(stage(ids))
    plain, four, eight = outputs
    assert 0.0 < (eight - plain).norm() < 0.1 * (four - plain).norm()
    assert (four - plain).norm() < 0.2 * plain.norm()


def test_bitsandbytes_has_the_same_nf4() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    weight = random_weight(96, 4 * BLOCK)
    theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4"))
    assert torch.allclose(PackedWeight(weight, "nf4").unpacked(torch.float32), theirs, atol=1e-6)
