"""Stages: any cut is the model of `transformers`, with its names, initial values and logits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import tiny
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.run.stage.decoder_parts import decoder_config
from weft.run.stage.families.gpt import gpt_config

FAMILIES = ("gpt", "llama")


def reference(config: ModelConfig) -> torch.nn.Module:
    if config.family == "gpt":
        return GPT2LMHeadModel(gpt_config(config))
    return LlamaForCausalLM(decoder_config(config))


def tokens(config: ModelConfig) -> torch.Tensor:
    return torch.randint(config.vocabulary, (3, config.sequence), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_is_the_one_of_transformers(family: str, tied: bool) -> None:
    config = tiny(family, tied=tied)
    model, expected = (
        build_stage(config, range(config.layers + 2), 3, torch.float64),
        reference(config).double(),
    )
    missing = expected.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == (["lm_head.weight"] if tied else [])
    torch.testing.assert_close(model(tokens(config)), expected(tokens(config)).logits, rtol=0, atol=0)


def test_norms_of_llama_are_fp32_in_a_model_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what equals one process within 1e-9 equals `transformers`, and not float64 throughout."""

    def gradients(family: str) -> dict[str, torch.Tensor]:
        config = tiny(family)
        model = build_stage(config, range(config.layers + 2), 3, torch.float64)
        model(tokens(config)).logsumexp(-1).mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def in_its_own_precision(self: LlamaRMSNorm, inputs: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (inputs * scale)

    rounded = gradients("llama")
    monkeypatch.setattr(LlamaRMSNorm, "forward", in_its_own_precision)
    exact = gradients("llama")
    off = max(float((rounded[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact)
    assert 1e-9 < off < 1e-5


@settings(max_examples=20)
@given(
    family=st.sampled_from(FAMILIES), cuts=st.sets(st.integers(1, 7), max_size=7), seed=st.integers(0, 2**62)
)
def test_any_cut_has_the_same_values_and_output(family: str, cuts: set[int], seed: int) -> None:
    config = tiny(family)
    whole = build_stage(config, range(8), seed, torch.float32)
    borders = [0, *sorted(cuts), 8]
    hidden, names = tokens(config), []
    for first, end in pairwise(borders):
        stage = build_stage(config, range(first, end), seed, torch.float32)
        assert tuple(hidden.shape) == stage.input_shape(3, config.sequence)
        hidden = stage(hidden)
        assert tuple(hidden.shape) == stage.output_shape(3, config.sequence)
        for name, value in stage.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name
            names.append(name)
    assert torch.equal(hidden, whole(tokens(config)))
    assert sorted(names) == sorted(whole.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_follow_the_family(family: str) -> None:
    config = replace(tiny(family, layers=2), hidden=128, feed_forward=256, vocabulary=500)
    torch.manual_seed(0)
    expected = reference(config).state_dict()
    values = build_stage(config, range(4), 0, torch.float32).state_dict()
    assert list(values) == list(expected)
    for name, value in values.items():
        if expected[name].std() == 0:
            assert torch.equal(value, expected[name]), name
        else:
            assert value.std().item() == pytest.approx(expected[name].std().item(), rel=0.1), name
            assert abs(value.mean().item()) < 0.1 * value.std().item(), name


def test_values_depend_on_seed_and_name_and_not_on_precision() -> None:
    config = tiny()
    first, other = (build_stage(config, [1, 2], seed, torch.float32).state_dict() for seed in (0, 1))
    name = "transformer.h.{}.mlp.c_fc.weight"
    assert not torch.equal(first[name.format(0)], other[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])
    exact = build_stage(config, [1, 2], 0, torch.float64).state_dict()
    assert torch.equal(exact[name.format(0)].float(), first[name.format(0)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_graph_counts_the_same_parameters(family: str) -> None:
    config = tiny(family)
    graph = layer_graph(config)
    for index, layer in enumerate(graph.layers):
        stage = build_stage(config, [index], 0, torch.float32)
        counted = sum(parameter.numel() for parameter in stage.parameters())
        assert counted == layer.parameters(Shape(1, config.sequence)), layer.name


def test_later_tokens_do_not_change_earlier_logits() -> None:
    for family in FAMILIES:
        config = tiny(family)
        model = build_stage(config, range(8), 0, torch.float64)
        changed = tokens(config).clone()
        changed[:, -1] = (changed[:, -1] + 1) % config.vocabulary
        before, after = model(tokens(config)), model(changed)
        torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=1e-12, atol=1e-12)
        assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        (tiny(), [], "must be at least one of 0 to 7"),
        (tiny(), [7, 8], "must be at least one of 0 to 7"),
        (tiny(), [1, 3], r"must follow each other \(nearest valid: \[1, 2, 3\]\)"),
        (
            replace(tiny(), family="lama"),
            [0],
            r"'lama' is not one of .*\(nearest valid: llama\)",
        ),
    ],
)
def test_impossible_stages_are_refused(config: ModelConfig, layers: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_stage(config, layers, 0, torch.float32)
