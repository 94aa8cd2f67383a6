"""BERT and vision transformers: sizes and kept elements equal the real classes; their files are read."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_bytes import saved_by_autograd
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig, image_tokens
from weft.describe.models import PRESETS, resolve_model
from weft.errors import InputError

BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}
VIT = {
    "model_type": "vit",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 4,
}


@st.composite
def configs(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    config = ModelConfig(
        name="drawn",
        family=draw(st.sampled_from(["bert", "vit"])),
        layers=draw(st.integers(1, 4)),
        hidden=heads * draw(st.sampled_from([8, 16])),
        heads=heads,
        key_value_heads=heads,
        feed_forward=draw(st.integers(1, 100)),
        vocabulary=draw(st.integers(3, 200)),
        sequence=draw(st.integers(1, 64)),
    )
    if config.family == "bert":
        return replace(config, tied_embeddings=draw(st.booleans()))
    patch = draw(st.integers(1, 4))
    image = patch * draw(st.integers(1, 4))
    return replace(
        config,
        image_size=image,
        patch_size=patch,
        channels=draw(st.sampled_from([1, 3])),
        sequence=image_tokens(image, patch),
    )


def real_model(config, layers=None):
    sizes = {
        "num_hidden_layers": layers or config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "sdpa",
    }
    if config.family == "bert":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=config.vocabulary,
                max_position_embeddings=config.sequence,
                tie_word_embeddings=config.tied_embeddings,
                **sizes,
            )
        )
    return ViTForImageClassification(
        ViTConfig(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_channels=config.channels,
            num_labels=config.vocabulary,
            **sizes,
        )
    )


def counted(config):
    """Parameters of the real model; an untied BERT's second bias, which nothing reads, left out."""
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in real_model(config).parameters())
    return total - (config.vocabulary if config.family == "bert" and not config.tied_embeddings else 0)


@given(configs())
def test_parameters_equal_the_real_model(config):
    assert layer_graph(config).parameters() == counted(config)


@pytest.mark.parametrize("name", ["bert-1m", "bert-base", "bert-large", "vit-digits", "vit-tiny", "vit-base"])
def test_parameters_of_presets_equal_the_real_model(name):
    assert layer_graph(PRESETS[name]).parameters() == counted(PRESETS[name])


def kept_by_autograd(config, layers, samples):
    """Bytes that the real model saves for its backward pass, parameters and buffers left out."""
    model = real_model(config, layers)
    if config.reads_images:
        inputs = torch.zeros((samples, config.channels, config.image_size, config.image_size))
    else:
        inputs = torch.zeros((samples, config.sequence), dtype=torch.long)
    return saved_by_autograd(lambda: model(inputs), (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", ["bert-1m", "vit-digits"])
def test_a_block_keeps_what_autograd_saves(name):
    config, samples = PRESETS[name], 4
    measured = (kept_by_autograd(config, 3, samples) - kept_by_autograd(config, 1, samples)) / 2
    block, shape = layer_graph(config).layers[1], Shape(samples, config.sequence)
    predicted = 4 * block.kept(shape) + block.kept_bytes(shape)
    assert measured == pytest.approx(predicted, rel=0.02)


@given(configs(), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_work_is_two_flops_per_weight_and_row_and_backward_is_twice_forward(config, size, degree):
    shape, graph = Shape(size, config.sequence, degree), layer_graph(config)
    tokens, width = size * config.sequence, config.hidden
    matrices = 4 * width * width + 2 * width * config.feed_forward
    attention = 2 * 2 * size * config.sequence**2 * width
    assert graph.layers[1].forward.flops(shape) == pytest.approx((2 * tokens * matrices + attention) / degree)
    for layer in graph.layers[1:]:
        assert layer.flops(shape) == pytest.approx(3 * layer.forward.flops(shape))
    first, last = graph.layers[0], graph.layers[-1]
    if config.reads_images:
        patches = size * (config.sequence - 1)
        pixels = config.channels * config.patch_size**2
        assert first.forward.flops(shape) == pytest.approx(2 * patches * pixels * width)
        assert first.flops(shape) == pytest.approx(2 * first.forward.flops(shape))
        assert last.forward.flops(shape) == pytest.approx(2 * size * width * config.vocabulary)
    else:
        assert first.flops(shape) == 0
        head = 2 * tokens * width * (width / shape.sequence_parallel + config.vocabulary / degree)
        assert last.forward.flops(shape) == pytest.approx(head)


@given(configs())
def test_a_graph_is_a_chain_and_reads_back_from_its_file(config):
    graph = layer_graph(config)
    blocks = [f"block.{index}" for index in range(config.layers)]
    assert [layer.name for layer in graph.layers] == ["embedding", *blocks, "head"]
    assert graph.is_chain
    assert LayerGraph.from_json(graph.to_json()) == graph


def write(folder, record):
    path = folder / "config.json"
    path.write_text(json.dumps(record))
    return str(path)


def test_files_of_transformers_are_read(tmp_path):
    BertConfig().save_pretrained(tmp_path / "bert")
    ViTConfig(num_labels=1000).save_pretrained(tmp_path / "vit")
    bert, vit = (resolve_model(str(tmp_path / name)) for name in ("bert", "vit"))
    assert bert.norm_epsilon == vit.norm_epsilon == 1e-12
    assert replace(bert, name="bert-base", norm_epsilon=None, record="") == PRESETS["bert-base"]
    assert replace(vit, name="vit-base", norm_epsilon=None, record="") == PRESETS["vit-base"]


def test_absent_labels_and_channels_take_the_defaults_of_transformers(tmp_path):
    config = resolve_model(write(tmp_path, VIT))
    assert (config.channels, config.vocabulary, config.sequence) == (3, 2, 10)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**BERT, "hidden_act": "relu"}, "hidden_act.*'relu' is not supported.*gelu"),
        ({**BERT, "type_vocab_size": 1}, "type_vocab_size.*nearest valid: 2"),
        ({**BERT, "is_decoder": True}, "is_decoder"),
        ({**VIT, "qkv_bias": False}, "qkv_bias"),
        ({**VIT, "patch_size": 5}, "image_size: 12 is not divisible by patch_size = 5 .nearest valid: 10"),
        ({**VIT, "image_size": [12, 12]}, "image_size.*must be an integer"),
        ({**VIT, "id2label": 3}, "id2label: 3: must be an object"),
    ],
)
def test_what_the_layers_do_not_stand_for_is_refused(tmp_path, record, message):
    with pytest.raises(InputError, match=message) as refused:
        resolve_model(write(tmp_path, record))
    assert len(refused.value.violations) == 1


def test_images_have_one_sequence():
    assert resolve_model("vit-base", sequence=197).sequence == 197
    with pytest.raises(InputError, match=r"100 tokens, but vit-base reads images of 197 .nearest valid: 197"):
        resolve_model("vit-base", sequence=100)


def test_a_file_of_bert_has_as_many_positions_as_it_says(tmp_path):
    path = write(tmp_path, BERT)
    assert resolve_model(path, sequence=16).sequence == 16
    with pytest.raises(InputError, match=r"33 tokens, but .* has 32 learned positions"):
        resolve_model(path, sequence=33)
