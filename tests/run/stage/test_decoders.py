"""Law: a decoder in any stages is the model of `transformers`, gradients included."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from decoder_models import tiny_decoder
from saved_bytes import saved_by_autograd
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weft.describe.amount import Shape
from weft.describe.decoder_row import TRAINED
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.errors import InputError
from weft.predict.cost.memory import alike_parameters
from weft.run.stage.build import build_stage
from weft.run.stage.stage_module import StageModule

# One of each kind of norms, windows, biases, scales and caps; `test_every_trained_row` builds all types.
TYPES = ("mistral", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "olmo2", "granite", "cohere2")
# Linear attention or own sizes in some blocks, attention to chosen tokens.
HYBRIDS = (
    *("qwen3_next", "deepseek_v32", "gemma4_unified_text"),
    *(
        pytest.param(one, marks=pytest.mark.tables)
        for one in ("qwen3_5_text", "olmo_hybrid", "laguna", "kimi_linear")
    ),
)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")


def whole_of(config: ModelConfig) -> torch.nn.Module:
    """With values of all parameters that change the result."""
    model = build_stage(config, range(config.layers + 2), 0, torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def reference_of(config: ModelConfig, model: torch.nn.Module) -> torch.nn.Module:
    """What `transformers` makes of the configuration, with the same values."""
    implementation = "eager" if config.decoder is not None and config.decoder.attention_cap else "sdpa"
    made = CONFIG_MAPPING[config.family].from_dict(json.loads(config.record))
    expected = AutoModelForCausalLM.from_config(
        made, attn_implementation=implementation, experts_implementation="eager"
    )
    expected = expected.double().eval()
    missing = expected.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == (["lm_head.weight"] if config.tied_embeddings else [])
    return expected


def batch_of(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocabulary, (2, 2, config.sequence), generator=generator)
    return tokens[0], tokens[1]


def gradients_of(
    logits: torch.Tensor, targets: torch.Tensor, *models: torch.nn.Module
) -> dict[str, torch.Tensor]:
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    return {
        name: one.grad for model in models for name, one in model.named_parameters() if one.grad is not None
    }


def require_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def require_as_in_transformers(config: ModelConfig) -> None:
    """Check that logits and gradients of the whole model are those of its twin in transformers."""
    model = whole_of(config)
    expected = reference_of(config, model)
    tokens, targets = batch_of(config)
    found, theirs = model(tokens), expected(tokens, use_cache=False).logits
    torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-10)
    require_close(gradients_of(found, targets, model), gradients_of(theirs, targets, expected))


@pytest.mark.parametrize("switched", [False, True], ids=["tiny", "switched"])
@pytest.mark.parametrize("model_type", [*TYPES, *HYBRIDS, *MIXTURES])
def test_logits_and_gradients_are_those_of_transformers(model_type: str, switched: bool) -> None:
    config = tiny_decoder(model_type, switched=switched)
    require_as_in_transformers(config)


@pytest.mark.parametrize("model_type", [*TYPES, *HYBRIDS, *MIXTURES])
def test_stages_have_the_output_and_the_gradients_of_the_whole(model_type: str) -> None:
    config = tiny_decoder(model_type, tie_word_embeddings=False)
    model = whole_of(config)
    tokens, targets = batch_of(config)
    expected = model(tokens)
    hidden, stages = tokens, []
    for first, end in pairwise([0, 1, 3, 6, 7]):
        stage = build_stage(config, range(first, end), 0, torch.float64)
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
        hidden = stage(hidden)
        assert tuple(hidden.shape) == stage.output_shape(2, config.sequence)
        stages.append(stage)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)
    require_close(gradients_of(hidden, targets, *stages), gradients_of(expected, targets, model))


@pytest.mark.parametrize("model_type", TRAINED)
def test_every_trained_row_counts_and_computes(model_type: str) -> None:
    config = tiny_decoder(model_type)
    graph, shape = layer_graph(config), Shape(1, config.sequence)
    counted = [
        sum(one.numel() for one in build_stage(config, [layer], 0, torch.float32).parameters())
        for layer in range(config.layers + 2)
    ]
    # A tied head's stage has a copy of the table, which counts in the first layer.
    layers = slice(-1) if config.tied_embeddings else slice(None)
    assert counted[layers] == [layer.parameters(shape) for layer in graph.layers][layers]
    model = whole_of(config)
    tokens, _ = batch_of(config)
    logits = model(tokens)
    torch.testing.assert_close(
        logits, reference_of(config, model)(tokens, use_cache=False).logits, rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("model_type", ["gemma4_unified_text", "deepseek_v3"])
def test_buffers_begin_as_in_the_library(model_type: str) -> None:
    config = tiny_decoder(model_type)
    model = build_stage(config, range(config.layers + 2), 0, torch.float32)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(json.loads(config.record)))
    expected = theirs.state_dict()
    own = {name: buffer for name, buffer in model.named_buffers() if name in expected}
    assert own
    assert all(torch.equal(buffer, expected[name]) for name, buffer in own.items())


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("mellum", {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}),
        ("dots1", {"max_window_layers": 2}),
        ("ministral", {"layer_types": ["full_attention", *["sliding_attention"] * 4]}),
        ("exaone_moe", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}),
    ],
)
def test_kinds_of_single_layers_are_those_of_transformers(
    model_type: str, keys: dict[str, list[str] | int]
) -> None:
    config = tiny_decoder(model_type, **keys)
    assert len({config.architecture.windows, (0,) * config.layers, ()}) == 3
    require_as_in_transformers(config)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_expert_ranks_hold_the_described_parameters(model_type: str) -> None:
    config = tiny_decoder(model_type)
    graph = layer_graph(config)
    divided = () if graph.refuse_tensor(2) else ((2, 2), (6, 2))
    for ranks, tensor in ((2, 1), (3, 1), (6, 1), *divided):
        shape = Shape(1, config.sequence, tensor, expert_parallel=ranks)
        layers = range(config.layers + 2)
        stages = [
            build_stage(
                config, layers, 0, torch.float32, tensor_share=(0, tensor), expert_share=(place, ranks)
            )
            for place in range(ranks)
        ]
        counts = [sum(one.numel() for one in stage.parameters()) for stage in stages]
        assert counts == [sum(layer.parameters(shape) for layer in graph.layers)] * ranks
        assert isinstance(stages[0], StageModule)
        divided = stages[0].expert_divisions
        alike = sum(one.numel() for name, one in stages[0].named_parameters() if name not in divided)
        assert alike_parameters(graph, range(len(graph.layers)), shape) == alike


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2",
        "gemma3_text",
        "starcoder2",
        "olmo2",
        "gemma2",
        "cohere",
        "mixtral",
        "qwen2_moe",
        "olmoe",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_block_keeps_what_autograd_saves(model_type: str, dtype: torch.dtype) -> None:
    config = tiny_decoder(model_type, max_position_embeddings=64)

    def saved_bytes(blocks: int) -> int:
        stage = build_stage(config, range(1, 1 + blocks), 0, dtype)
        stream = torch.randn(2, config.sequence, config.hidden, dtype=dtype, requires_grad=True)
        return saved_by_autograd(lambda: stage(stream), (*stage.parameters(), *stage.buffers()))

    # The third block is like the first one where windows alternate.
    measured = saved_bytes(3) - saved_bytes(2)
    block, shape = layer_graph(config).layers[3], Shape(2, config.sequence)
    predicted = dtype.itemsize * block.kept(shape) + block.kept_bytes(shape)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_next", "bailing_hybrid", "gemma4_unified_text"),
        *(pytest.param(one, marks=pytest.mark.tables) for one in ("olmo_hybrid", "afmoe")),
    ],
)
def test_blocks_of_every_kind_keep_what_autograd_saves(model_type: str) -> None:
    # Autograd keeps more copies of linear attention in fp32.
    config, dtype = replace(tiny_decoder(model_type), sequence=256), torch.bfloat16
    layers = layer_graph(config).layers
    shape = Shape(2, config.sequence)
    for index in (1, 4):
        if config.architecture.latent is not None and config.architecture.linear_in(index - 1) is None:
            # Torch has no fused kernel of latent attention on a CPU.
            continue
        stage = build_stage(config, [index, index + 1], 0, dtype)
        block = build_stage(config, [index + 1], 0, dtype)
        stream = torch.randn(2, config.sequence, config.hidden, dtype=dtype, requires_grad=True)
        measured = [
            saved_by_autograd(partial(one, stream), (*one.parameters(), *one.buffers()))
            for one in (stage, block)
        ]
        predicted = dtype.itemsize * layers[index].kept(shape) + layers[index].kept_bytes(shape)
        assert predicted == pytest.approx(measured[0] - measured[1], rel=0.05)


def test_a_configuration_that_transformers_refuses_is_refused_in_one_line() -> None:
    config = tiny_decoder("qwen3", hidden_act="no such function")
    with pytest.raises(InputError) as refused:
        build_stage(config, [1], 0, torch.float32)
    assert len(refused.value.violations) == 1
