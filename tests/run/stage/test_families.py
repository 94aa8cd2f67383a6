"""Stages of BERT and of vision transformers: any cut is the model of `transformers`, gradients included."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_jobs import SEED
from small_plans import tiny
from transformers import BertForMaskedLM, ViTForImageClassification

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.run.stage.build import build_stage
from weft.run.stage.families.bert import bert_config
from weft.run.stage.families.vit import vit_config

FAMILIES = ("bert", "vit")


def small(family: str, *, tied: bool = False) -> ModelConfig:
    config = replace(tiny(tied=tied), family=family)
    if family == "bert":
        return config
    return replace(config, image_size=6, patch_size=2, channels=3, sequence=10, vocabulary=5)


def reference(config: ModelConfig) -> torch.nn.Module:
    if config.family == "bert":
        return BertForMaskedLM(bert_config(config)).double().eval()
    return ViTForImageClassification(vit_config(config)).double().eval()


def batch(config: ModelConfig, samples: int, key: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(key)
    if config.reads_images:
        pixels = torch.randn(samples, 3, 6, 6, generator=generator)
        return pixels, torch.randint(config.vocabulary, (samples,), generator=generator)
    tokens = torch.randint(config.vocabulary, (2, samples, config.sequence), generator=generator)
    return tokens[0], tokens[1]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def built(config: ModelConfig, *layers: int, seed: int = SEED) -> torch.nn.Module:
    return build_stage(config, layers, seed, torch.float64)


def whole(config: ModelConfig, seed: int = SEED) -> torch.nn.Module:
    return built(config, *range(config.layers + 2), seed=seed)


@pytest.mark.parametrize(("family", "tied"), [("bert", False), ("bert", True), ("vit", False)])
def test_the_whole_model_is_the_one_of_transformers(family: str, tied: bool) -> None:
    config = small(family, tied=tied)
    model, expected = whole(config), reference(config)
    missing = expected.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys
    # An untied BERT of transformers holds a second bias that nothing reads.
    left_out = {
        ("bert", False): ["cls.predictions.bias"],
        ("bert", True): ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
    }
    assert missing.missing_keys == left_out.get((family, tied), [])
    inputs, _ = batch(config, 3)
    exact = inputs.double() if inputs.is_floating_point() else inputs
    torch.testing.assert_close(model(inputs), expected(exact).logits, rtol=0, atol=0)


@settings(max_examples=10)
@given(family=st.sampled_from(FAMILIES), cuts=st.sets(st.integers(1, 7), max_size=7))
def test_any_cut_has_the_output_and_the_gradients_of_the_whole(family: str, cuts: set[int]) -> None:
    config = small(family)
    model = whole(config)
    inputs, targets = batch(config, 3)
    loss_of(model(inputs), targets).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    hidden, stages = inputs, []
    for first, end in pairwise([0, *sorted(cuts), 8]):
        stage = built(config, *range(first, end))
        assert tuple(hidden.shape) == stage.input_shape(3, config.sequence)
        hidden = stage(hidden)
        assert tuple(hidden.shape) == stage.output_shape(3, config.sequence)
        stages.append(stage)
    torch.testing.assert_close(hidden, model(inputs), rtol=0, atol=0)
    loss_of(hidden, targets).backward()
    parts = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    assert set(parts) == set(gradients)
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_graph_counts_the_same_parameters(family: str) -> None:
    config = small(family)
    for index, layer in enumerate(layer_graph(config).layers):
        counted = sum(parameter.numel() for parameter in built(config, index).parameters())
        assert counted == layer.parameters(Shape(1, config.sequence)), layer.name


def test_a_tied_head_of_its_own_stage_has_the_table_of_the_first_one() -> None:
    config = small("bert", tied=True)
    model, first, last = whole(config), built(config, *range(4)), built(config, *range(4, 8))
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(first.get_parameter(name), last.get_parameter(name))
    assert [table.shape for table in last.tied_parameters()] == [(config.vocabulary, config.hidden)]
    inputs, _ = batch(config, 2)
    torch.testing.assert_close(last(first(inputs)), model(inputs), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_follow_the_family(family: str) -> None:
    config = replace(small(family), layers=2, hidden=128, feed_forward=256, vocabulary=500)
    torch.manual_seed(0)
    expected = reference(config).state_dict()
    for name, value in whole(config).state_dict().items():
        if expected[name].std() == 0:
            assert torch.equal(value, expected[name]), name
        else:
            # Some tables are small: the deviation of n draws is uncertain by 1 / sqrt(2 n).
            uncertain = 5 / (2 * value.numel()) ** 0.5
            assert value.std().item() == pytest.approx(expected[name].std().item(), rel=0.1 + uncertain), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_changes_every_output(family: str) -> None:
    config = small(family)
    model = whole(config)
    inputs, _ = batch(config, 1)
    changed = inputs.clone()
    changed[..., -1] = (changed[..., -1] + 1) % config.vocabulary
    assert (model(inputs) != model(changed)).any(-1).all()
