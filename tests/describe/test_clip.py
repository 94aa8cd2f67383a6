"""CLIP: files are read, with the parameters and the kept bytes of `transformers`' model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_bytes import saved_by_autograd
from tower_jobs import inputs_of_towers
from transformers import CLIPConfig, CLIPModel

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.families.transformer import LOSS_BYTES_PER_LOGIT, TOKEN_BYTES
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig, model_from
from weft.describe.models import PRESETS, resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.run.supported import planned_only

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 7,
    "vocab_size": 11,
}
IMAGE = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
SMALL = {"model_type": "clip", "projection_dim": 5, "text_config": TEXT, "vision_config": IMAGE}


def read(folder: Path, record: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(record))
    return resolve_model(str(folder))


@pytest.mark.parametrize("record", [SMALL, {"model_type": "clip"}, SMALL | {"text_config": None}])
def test_parameters_equal_those_of_transformers(tmp_path: Path, record: dict[str, Any]) -> None:
    config = read(tmp_path, record)
    sizes = {key: value for key, value in record.items() if key != "model_type" and value is not None}
    with torch.device("meta"):
        real = CLIPModel(CLIPConfig(**sizes))
    graph = layer_graph(config)
    assert graph.parameters() == sum(one.numel() for one in real.parameters())
    assert len(graph.layers) == config.layers + 2
    assert LayerGraph.from_json(graph.to_json()) == graph
    assert model_from(json.loads(json.dumps(asdict(config)))) == config
    assert [str(one) for one in planned_only(config)] == [
        f"model {config.name}: clip is planned only; weft does not train it yet"
    ]


def kept_of_a_block(act: str, side: str) -> float:
    """The bytes that one block keeps: the difference of a tower of three and one of two."""

    def kept(layers: int) -> int:
        record = {key: dict(value) for key, value in (("text_config", TEXT), ("vision_config", IMAGE))}
        for one in record.values():
            one["hidden_act"] = act
        record[side]["num_hidden_layers"] = layers
        model = CLIPModel(CLIPConfig(**record))
        text, pixels = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 3, 12, 12)
        return saved_by_autograd(
            lambda: model(input_ids=text, pixel_values=pixels), (*model.parameters(), *model.buffers())
        )

    return kept(3) - kept(2)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize(
    ("side", "layer"), [("vision_config", "image.block.1"), ("text_config", "text.block.1")]
)
def test_a_block_keeps_what_autograd_saves(tmp_path: Path, act: str, side: str, layer: str) -> None:
    record = SMALL | {"text_config": TEXT | {"hidden_act": act}, "vision_config": IMAGE | {"hidden_act": act}}
    graph = layer_graph(read(tmp_path, record))
    block = next(one for one in graph.layers if one.name == layer)
    shape = Shape(3, 7)
    assert 4 * block.kept(shape) + block.kept_bytes(shape) == pytest.approx(
        kept_of_a_block(act, side), rel=0.03
    )


def test_a_matching_model_has_every_amount_of_the_real_module() -> None:
    config = PRESETS["image-text-tiny"]
    graph, shape = layer_graph(config), Shape(3, config.sequence)
    model = build_stage(config, range(config.layers + 2), 0, torch.float32)
    inputs = inputs_of_towers(config, 3)
    assert graph.parameters() == sum(parameter.numel() for parameter in model.parameters())
    kept = saved_by_autograd(lambda: model(*inputs), model.parameters())
    loss = 3 * (4 + LOSS_BYTES_PER_LOGIT + TOKEN_BYTES)
    assert sum(4 * one.kept(shape) + one.kept_bytes(shape) for one in graph.layers) - loss == kept
    values: list[torch.Tensor] = []
    for place, (layer, function) in enumerate(
        zip(graph.layers, model.layer_functions(inputs[0]), strict=True)
    ):
        read = [inputs[number] for number in graph.inputs_read[place]]
        values.append(function(*read, *(values[one] for one in sorted(graph.feeders[place]))))
        assert layer.name == "head" or layer.sent(shape) == values[-1].numel()


def test_images_have_their_own_tokens_and_only_the_head_joins_the_towers(tmp_path: Path) -> None:
    graph = layer_graph(read(tmp_path, SMALL))
    sent = {layer.name: layer.sent(Shape(2, 7)) for layer in graph.layers}
    assert sent["image.block.0"] == 2 * 10 * 8
    assert sent["text.block.0"] == 2 * 7 * 16
    assert sent["image.projection"] == sent["text.projection"] == 2 * 5
    names = [layer.name for layer in graph.layers]
    joined = {names[one] for one in graph.feeders[names.index("head")]}
    assert joined == {"image.projection", "text.projection"}
    assert graph.inputs == ((0, 0), (1, names.index("text.embedding")))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vision_config": IMAGE | {"patch_size": 5}}, "image_size: 12 is not divisible by patch_size = 5"),
        ({"text_config": TEXT | {"hidden_size": 15}}, "15 is not divisible by num_attention_heads = 2"),
        ({"text_config": [1]}, "text_config: .* must be an object"),
        ({"projection_dim": 0}, "projection_dim: 0: must be an integer"),
        ({"text_config": TEXT | {"hidden_act": "relu"}}, "hidden_act: 'relu' is not one of quick_gelu, gelu"),
        ({"text_config": TEXT | {"hidden_act": "gelu"}}, "both towers need the same activation"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read(tmp_path, SMALL | changes)
