"""Families: parameters and kept elements equal the real classes; work obeys the laws of products."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_bytes import saved_by_autograd
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.models import PRESETS
from weft.errors import InputError

SMALL = [
    PRESETS["gpt-1m"],
    PRESETS["llama-1m"],
    ModelConfig(
        name="tied-gpt",
        family="gpt",
        layers=2,
        hidden=48,
        heads=3,
        key_value_heads=3,
        feed_forward=100,
        vocabulary=77,
        sequence=40,
        tied_embeddings=True,
    ),
    ModelConfig(
        name="tied-llama",
        family="llama",
        layers=3,
        hidden=64,
        heads=8,
        key_value_heads=2,
        feed_forward=90,
        vocabulary=101,
        sequence=32,
        tied_embeddings=True,
    ),
]


@st.composite
def configs(draw):
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    family = draw(st.sampled_from(["gpt", "llama"]))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 6) if heads % g == 0]))
    return ModelConfig(
        name="drawn",
        family=family,
        layers=draw(st.integers(1, 5)),
        hidden=heads * draw(st.sampled_from([8, 16, 64])),
        heads=heads,
        key_value_heads=heads if family == "gpt" else groups,
        feed_forward=draw(st.integers(1, 500)),
        vocabulary=draw(st.integers(1, 1000)),
        sequence=draw(st.integers(1, 300)),
        tied_embeddings=draw(st.booleans()),
    )


shapes = st.builds(Shape, st.integers(1, 8), st.integers(1, 512), st.sampled_from([1, 2, 4]))


def real_model(config: ModelConfig, layers: int | None = None) -> torch.nn.Module:
    layers = layers or config.layers
    if config.family == "gpt":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocabulary,
                n_positions=config.sequence,
                n_embd=config.hidden,
                n_layer=layers,
                n_head=config.heads,
                n_inner=config.feed_forward,
                # The same function as the default, computed by one kernel that keeps its input only.
                activation_function="gelu_pytorch_tanh",
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
                tie_word_embeddings=config.tied_embeddings,
                attn_implementation="sdpa",
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            num_hidden_layers=layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_value_heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=config.sequence,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="sdpa",
        )
    )


@pytest.mark.parametrize(
    "config", [*SMALL, *(PRESETS[name] for name in ("gpt2", "llama-1b", "llama-3-8b"))], ids=lambda c: c.name
)
def test_parameters_equal_the_real_model(config):
    with torch.device("meta"):
        model = real_model(config)
    assert layer_graph(config).parameters() == sum(p.numel() for p in model.parameters())


def kept_by_autograd(config: ModelConfig, layers: int, samples: int, dtype: torch.dtype) -> int:
    """Bytes that the real model saves for its backward pass, parameters and buffers left out."""
    model = real_model(config, layers).to(dtype)
    tokens = torch.zeros((samples, config.sequence), dtype=torch.long)
    return saved_by_autograd(lambda: model(tokens, use_cache=False), (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt-1m", "llama-1m"])
def test_a_block_keeps_what_autograd_saves(name, dtype):
    config, samples = PRESETS[name], 2
    one, three = (kept_by_autograd(config, layers, samples, dtype) for layers in (1, 3))
    block, shape = layer_graph(config).layers[1], Shape(samples, config.sequence)
    predicted = dtype.itemsize * block.kept(shape) + block.kept_bytes(shape)
    assert (three - one) / 2 == pytest.approx(predicted, rel=0.01)


def test_gpt_block_keeps_korthikanti_without_scores_and_masks():
    config = PRESETS["gpt3-175b"]
    shape = Shape(1, config.sequence, 8)
    per_token_and_width = shape.sequence * config.hidden
    kept = 2 * layer_graph(config).layers[1].kept(shape)
    # 34 s b h / t bytes of arXiv 2205.05198, equation 4, less the two byte masks of dropout; the inputs of
    # divided products, 4 s b h, are kept gathered.
    assert kept == per_token_and_width * (4 + 28 / 8)
    # s b h (10 + 24 / t), equation 2, less the masks, where the sequence is not divided.
    odd = Shape(1, config.sequence - 1, 8)
    assert 2 * layer_graph(config).layers[1].kept(odd) == (config.sequence - 1) * config.hidden * (8 + 24 / 8)


@given(configs(), shapes)
def test_forward_products_are_two_flops_per_parameter_and_token_plus_attention(config, shape):
    graph = layer_graph(config)
    tokens = shape.micro_batch_size * shape.sequence
    width, inner, heads = config.hidden, config.feed_forward, config.heads
    keys = width // heads * config.key_value_heads
    matrices = 2 * width * (width + keys) + (2 if config.family == "gpt" else 3) * width * inner
    attention = 2 * 2 * shape.micro_batch_size * shape.sequence**2 * width
    expected = (2 * tokens * matrices + attention) / shape.tensor_parallel
    assert graph.layers[1].forward.flops(shape) == pytest.approx(expected)
    head = 2 * tokens * width * config.vocabulary / shape.tensor_parallel
    assert graph.layers[-1].forward.flops(shape) == pytest.approx(head)
    assert graph.layers[0].flops(shape) == 0


@given(configs(), shapes)
def test_backward_is_twice_forward_and_attention_has_no_weight_part(config, shape):
    for layer in layer_graph(config).layers:
        forward = layer.forward.flops(shape)
        assert layer.flops(shape) == pytest.approx(3 * forward)
        attention = sum(m.flops(shape) for m in layer.forward.matmuls if m.count(Shape(2, 1)) > 1)
        assert layer.backward_weight.flops(shape) == pytest.approx(forward - attention)


@given(configs(), shapes)
def test_everything_falls_with_the_tensor_degree_except_what_is_replicated(config, shape):
    alone = Shape(shape.micro_batch_size, shape.sequence)
    for layer in layer_graph(config).layers:
        for amount in (layer.parameters, layer.kept, layer.kept_bytes):
            assert 0 <= amount(shape) <= amount(alone)
        assert layer.sent(shape) == layer.sent(alone) / shape.sequence_parallel
        assert layer.tensor_reduced(shape) == layer.tensor_reduced(alone)


@given(configs())
def test_a_graph_reads_back_from_its_file(config):
    graph = layer_graph(config)
    again = LayerGraph.from_json(graph.to_json())
    assert again == graph
    assert again.fingerprint == graph.fingerprint


@given(configs())
def test_layers_are_a_chain_of_embedding_blocks_and_head(config):
    graph = layer_graph(config)
    blocks = [f"block.{index}" for index in range(config.layers)]
    assert [layer.name for layer in graph.layers] == ["embedding", *blocks, "head"]
    assert graph.is_chain
    shape = Shape(2, 16)
    assert {layer.sent(shape) for layer in graph.layers[:-1]} == {2 * 16 * config.hidden}
    assert graph.layers[-1].sent(shape) == 0


def test_tied_embeddings_have_one_matrix_and_the_same_product():
    tied = SMALL[2]
    untied = ModelConfig(**{**{k: getattr(tied, k) for k in tied.__slots__}, "tied_embeddings": False})
    one, two = layer_graph(tied), layer_graph(untied)
    assert two.parameters() - one.parameters() == tied.vocabulary * tied.hidden
    assert one.layers[-1].flops(Shape(1, 8)) == two.layers[-1].flops(Shape(1, 8))


@given(
    st.integers(1, 5),
    st.sampled_from([32, 64, 512]),
    st.integers(1, 1000),
    st.sampled_from([1, 4, 8]),
    shapes,
)
def test_gpt_computes_and_holds_what_narayanan_et_al_say(layers, h, vocabulary, heads, shape):
    """arXiv 2104.04473: 96 B s l h^2 (1 + s / 6h + V / 16lh) operations where blocks are recomputed, and
    12 l h^2 (1 + 13 / 12h + (V + s) / 12lh) parameters, with the two of each channel in the last norm."""
    s, b = shape.sequence, shape.micro_batch_size
    config = ModelConfig(
        name="drawn",
        family="gpt",
        layers=layers,
        hidden=h,
        heads=heads,
        key_value_heads=heads,
        feed_forward=4 * h,
        vocabulary=vocabulary,
        sequence=s,
        tied_embeddings=True,
    )
    graph, whole = layer_graph(config), Shape(b, s)
    flops = sum(
        layer.flops(whole) + (layer.kind == "block") * layer.forward.flops(whole) for layer in graph.layers
    )
    matrices = 12 * layers * h**2
    assert flops == pytest.approx(8 * b * s * matrices * (1 + s / (6 * h) + vocabulary / (16 * layers * h)))
    parameters = matrices * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))
    assert graph.parameters() == pytest.approx(parameters + 2 * h)


def test_an_unknown_family_is_refused_with_the_nearest():
    config = ModelConfig(**{**{k: getattr(SMALL[0], k) for k in SMALL[0].__slots__}, "family": "lama"})
    with pytest.raises(InputError, match="nearest valid: llama"):
        layer_graph(config)
