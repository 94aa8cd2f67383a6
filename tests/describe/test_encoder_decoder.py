"""Encoder and decoder: sizes, work and kept bytes equal the real modules; files of T5 are read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_bytes import saved_by_autograd
from torch.utils.flop_counter import FlopCounterMode
from tower_jobs import inputs_of_towers
from transformers import T5Config, T5ForConditionalGeneration

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.families.transformer import LOSS_BYTES_PER_LOGIT, TOKEN_BYTES
from weft.describe.graph_models import encoder_decoder_config
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig, model_from
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.run.supported import planned_only

T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 4,
    "num_heads": 2,
    "num_layers": 2,
    "vocab_size": 11,
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.integers(1, 2))
    return encoder_decoder_config(
        "drawn",
        family="encoder-decoder",
        encoder_layers=draw(st.integers(1, 3)),
        decoder_layers=draw(st.integers(1, 3)),
        hidden=8 * heads,
        heads=heads,
        feed_forward=draw(st.integers(1, 9)),
        vocabulary=draw(st.integers(2, 9)),
        sequence=draw(st.integers(2, 5)),
    )


@settings(max_examples=12)
@given(configs(), st.integers(2, 3))
def test_every_amount_is_that_of_the_real_module(config: ModelConfig, samples: int) -> None:
    graph, shape = layer_graph(config), Shape(samples, config.sequence)
    model = build_stage(config, range(config.layers + 2), 0, torch.float32)
    inputs = inputs_of_towers(config, samples)
    assert graph.parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert len(graph.layers) == config.layers + 2
    kept = saved_by_autograd(lambda: model(*inputs), model.parameters())
    loss = samples * config.sequence * ((4 + LOSS_BYTES_PER_LOGIT) * config.vocabulary + TOKEN_BYTES)
    assert sum(4 * one.kept(shape) + one.kept_bytes(shape) for one in graph.layers) - loss == kept
    values: list[torch.Tensor] = []
    for place, (layer, function) in enumerate(
        zip(graph.layers, model.layer_functions(inputs[0]), strict=True)
    ):
        read = [inputs[number] for number in graph.inputs_read[place]]
        with FlopCounterMode(display=False) as counter:
            values.append(function(*read, *(values[one] for one in sorted(graph.feeders[place]))))
        # The counter does not know the kernel of attention on a CPU.
        unseen = sum(one.flops(shape) for one in layer.forward.matmuls if one.kernel != "product")
        assert layer.forward.flops(shape) - unseen == counter.get_total_flops()
        assert layer.name == "head" or layer.sent(shape) == values[-1].numel()


@settings(max_examples=12)
@given(configs())
def test_every_decoder_block_reads_the_encoder(config: ModelConfig) -> None:
    graph = layer_graph(config)
    names = [layer.name for layer in graph.layers]
    memory = names.index("encoder.norm")
    reading = [name for name, before in zip(names, graph.feeders, strict=True) if memory in before]
    assert reading == [name for name in names if name.startswith("decoder.block")]
    assert graph.inputs == ((0, 0), (1, memory + 1))
    assert LayerGraph.from_json(graph.to_json()) == graph
    assert model_from(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_decoder_layers": 3},
        {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
        {"relative_attention_num_buckets": 8, "num_heads": 3},
    ],
)
def test_files_of_t5_have_the_parameters_of_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    record = T5 | changes
    (tmp_path / "config.json").write_text(json.dumps(record))
    config = resolve_model(str(tmp_path), sequence=64)
    with torch.device("meta"):
        real = T5ForConditionalGeneration(T5Config(**{k: v for k, v in record.items() if k != "model_type"}))
    assert layer_graph(config).parameters() == sum(one.numel() for one in real.parameters())
    assert config.sequence == 64
    assert [str(one) for one in planned_only(config)] == [
        f"model {config.name}: t5 is planned only; weft does not train it yet"
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"d_kv": None}, "d_kv"),
        ({"num_layers": 0}, "num_layers: 0: must be an integer of at least 1"),
        ({"feed_forward_proj": "swish"}, "feed_forward_proj"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
    ],
)
def test_wrong_files_of_t5_are_refused(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    record = {key: value for key, value in (T5 | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=problem):
        resolve_model(str(tmp_path))
