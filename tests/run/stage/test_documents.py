"""Laws: a packed sample has the outputs and gradients of its documents one by one."""

from __future__ import annotations

import pytest
import torch
from decoder_models import tiny_decoder
from hypothesis import given
from hypothesis import strategies as st
from small_plans import tiny

from weft.describe.decoder_row import TRAINED
from weft.describe.model import ModelConfig
from weft.describe.plan import PACKING, Choice
from weft.run.stage.build import build_stage
from weft.run.stage.documents import Documents, part_of
from weft.run.stage.stage_module import StageModule
from weft.run.stage.windows import causal_mask

PACKED = Choice(name=PACKING)
CPU = torch.device("cpu")
LENGTHS = ([3, 1, 4], [8], [1, 1, 6])
# Their blocks are like those of other types.
ALIKE = (
    *("kimi_linear", "bailing_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    *("glm_moe_dsa", "laguna", "gemma4_text"),
)
FAMILIES = [
    pytest.param(family, marks=pytest.mark.tables if family in ALIKE else ()) for family in ("gpt", *TRAINED)
]


def config_of(family: str) -> ModelConfig:
    return tiny("gpt", layers=2) if family == "gpt" else tiny_decoder(family)


def stage_of(config: ModelConfig, *methods: Choice) -> StageModule:
    stage = build_stage(config, range(config.layers + 2), 3, torch.float64, methods=methods)
    assert isinstance(stage, StageModule)
    return stage


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sample_computes_what_its_documents_compute_alone(family: str) -> None:
    config = config_of(family)
    packed, plain = stage_of(config, PACKED), stage_of(config)
    ids = torch.randint(config.vocabulary, (3, 8), generator=torch.Generator().manual_seed(1))
    packed.documents = Documents.of(LENGTHS, CPU)
    together = packed(ids)
    alone = torch.stack(
        [
            torch.cat([plain(one.unsqueeze(0))[0] for one in row.split(lengths)])
            for row, lengths in zip(ids, LENGTHS, strict=True)
        ]
    )
    # Some routers compute in fp32, whose products depend on the number of rows.
    mixed = config.decoder is not None and config.decoder.experts is not None
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-6 if mixed else 1e-10)
    weight = torch.randn(together.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for outputs in (together, alone):
        (outputs * weight).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        # Some families compute their norms in fp32, too.
        largest = 0.0 if other.grad is None else float(other.grad.abs().max())
        near = (1e-5 if mixed else 1e-6) * max(1.0, largest)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=near, msg=name)


@pytest.mark.parametrize("family", ["gpt", "llama", "gemma2"])
def test_documents_of_whole_samples_change_nothing(family: str) -> None:
    config = config_of(family)
    packed, plain = stage_of(config, PACKED), stage_of(config)
    ids = torch.arange(16).view(2, 8) % config.vocabulary
    expected = plain(ids)
    torch.testing.assert_close(packed(ids), expected, rtol=1e-12, atol=1e-12)
    packed.documents = Documents.of(([8], [8]), CPU)
    torch.testing.assert_close(packed(ids), expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_a_mask_shows_each_token_the_window_before_it_in_its_document(
    lengths: list[int], window: int
) -> None:
    tokens, like = sum(lengths), torch.zeros(1)
    found = Documents.of([lengths], CPU).mask(window, like)
    assert found.shape == (1, 1, tokens, tokens)
    blocks = torch.block_diag(*[(causal_mask(one, window, like)[0, 0] == 0).float() for one in lengths])
    assert torch.equal(found[0, 0] == 0, blocks == 1)


@given(st.integers(1, 12), st.integers(1, 5))
def test_parts_are_those_of_tensors(samples: int, splits: int) -> None:
    numbers = torch.arange(samples)
    lengths = [[int(one) + 1] for one in numbers]
    parts = [part_of(lengths, splits, part) for part in range(splits)]
    expected = [[[int(one) + 1] for one in part] for part in numbers.tensor_split(splits)]
    assert parts == expected
