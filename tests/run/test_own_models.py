"""Stages of a model of one's own: any cut has the same values, outputs and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage

NAMES = ("own_models:images", "own_models:text")


def batch(config: ModelConfig, samples: int, key: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(key)
    if config.reads_images:
        labels = torch.randint(config.vocabulary, (samples,), generator=generator)
        return torch.randn(samples, 1, 8, 8, generator=generator), labels
    tokens = torch.randint(config.vocabulary, (2, samples, config.sequence), generator=generator)
    return tokens[0], tokens[1]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@settings(max_examples=10)
@given(name=st.sampled_from(NAMES), cuts=st.sets(st.integers(1, 2)), seed=st.integers(0, 2**60))
def test_any_cut_has_the_output_and_the_gradients_of_the_whole(name: str, cuts: set[int], seed: int) -> None:
    config = resolve_model(name)
    count = config.layers + 2
    model = build_stage(config, range(count), seed, torch.float64)
    inputs, targets = batch(config, 3)
    loss_of(model(inputs), targets).backward()
    expected = dict(model.named_parameters())
    value, stages = inputs, []
    for first, end in pairwise([0, *sorted(cuts), count]):
        stage = build_stage(config, range(first, end), seed, torch.float64)
        assert tuple(value.shape) == stage.input_shape(3, config.sequence)
        value = stage(value)
        assert tuple(value.shape) == stage.output_shape(3, config.sequence)
        stages.append(stage)
    loss_of(value, targets).backward()
    parts = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    assert set(parts) == set(expected)
    for name, parameter in parts.items():
        assert torch.equal(parameter, expected[name]), name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-12)


def test_seeds_and_positions_draw_apart_and_leave_the_generator_alone() -> None:
    config = resolve_model("own_models:images")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other = (build_stage(config, [1, 2], seed, torch.float32).state_dict() for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    name = "layers.{}.convolution.weight"
    assert not torch.equal(one[name.format(1)], other[name.format(1)])
    assert not torch.equal(one[name.format(1)], one[name.format(2)])


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="must be at least one of 0 to 3"):
        build_stage(resolve_model("own_models:images"), [3, 4], 0, torch.float32)


@pytest.mark.parametrize(
    ("name", "unit"), [("images", "images"), ("text", "tokens"), ("conditioned", "samples")]
)
def test_speeds_count_the_parts_of_samples(name: str, unit: str) -> None:
    assert resolve_model(f"own_models:{name}").unit == unit
