"""Law: linear attention begins as the library lets it begin, under every cut."""

from __future__ import annotations

import pytest
import torch
from decoder_models import tiny_decoder

from weft.run.stage.build import build_stage


@pytest.mark.parametrize(
    ("model_type", "biases"),
    [("qwen3_next", (1.0, 1.0)), ("olmo_hybrid", (-6.91, -2.25)), ("bailing_hybrid", (-6.91, -2.25))],
)
def test_decays_and_norms_of_states_begin_as_in_the_library(
    model_type: str, biases: tuple[float, float]
) -> None:
    config = tiny_decoder(model_type)
    alone = build_stage(config, [1], 3, torch.float32)
    values = dict(alone.named_parameters())
    whole = dict(build_stage(config, range(config.layers + 2), 3, torch.float32).named_parameters())
    assert all(torch.equal(value, whole[name]) for name, value in values.items())
    ends = {name.rpartition(".")[2]: value.detach() for name, value in values.items()}
    # The rates are uniform below 16, and the biases those of steps from 0.001 to 0.1.
    assert 0.0 < float(ends["A_log"].exp().min()) < float(ends["A_log"].exp().max()) <= 16.0
    low, high = biases
    assert low - 0.01 <= float(ends["dt_bias"].min()) <= float(ends["dt_bias"].max()) <= high + 0.01
    [norm] = [
        value for name, value in values.items() if name.endswith(("linear_attn.norm.weight", "o_norm.weight"))
    ]
    assert torch.equal(norm, torch.ones_like(norm))
