"""Low-rank products in stages, and as files: the same function merged, and in peft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from asked_methods import with_low_rank
from decoder_models import tiny_decoder
from hugging_face_jobs import inputs_of, model_folder, transformers_logits, whole_model
from safetensors.torch import load_file, save_file
from saved_bytes import saved_by_autograd
from small_plans import divisible, tiny
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.describe.added_layers import trained_graph
from weft.describe.amount import Shape
from weft.describe.block_products import block_products
from weft.describe.model import ModelConfig
from weft.methods.lora.runtime.export import ADAPTER
from weft.run.stage.build import build_stage
from weft.run.stage.stage_module import Filling, StageModule
from weft.training.checkpoint.tensor_folders import SafetensorsFolder
from weft.training.interchange.hugging_face import write_adapter, write_folder
from weft.training.interchange.imports import read_initial_weights
from weft.training.interchange.matching import match_weights

CHOICE = with_low_rank(4, 6.0)
TYPES = ("llama", "qwen3", "phi3", "gemma3_text", "gpt_neox", "olmo2", "cohere", "starcoder2")


def config_of(family: str) -> ModelConfig:
    return tiny("gpt", layers=2) if family == "gpt" else tiny_decoder(family)


def adapted(config: ModelConfig) -> StageModule:
    """The whole model with random values in both products."""
    stage = build_stage(config, range(config.layers + 2), 3, torch.float32, methods=[CHOICE])
    assert isinstance(stage, StageModule)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, one in stage.named_parameters():
            if one.requires_grad:
                assert ".lora_" in name
                one.normal_(0.0, 0.2, generator=generator)
    return stage.eval()


@pytest.mark.parametrize("family", ["gpt", *TYPES])
def test_linear_layers_have_the_names_and_sizes_of_transformers(family: str) -> None:
    config = config_of(family)
    with torch.device("meta"):
        stage = build_stage(config, range(config.layers + 2), 3, torch.float32)
    found = [
        (name.rpartition(".")[2], *(one.weight.shape if isinstance(one, Conv1D) else one.weight.shape[::-1]))
        for name, one in stage.blocks[0].named_modules()
        if isinstance(one, nn.Linear | Conv1D)
    ]
    assert sorted(found) == sorted((one.name, one.inner, one.columns) for one in block_products(config))


@pytest.mark.parametrize("family", ["gpt", *TYPES])
def test_a_stage_trains_as_many_parameters_as_its_layers_say(family: str) -> None:
    config = config_of(family)
    graph = trained_graph(config, [CHOICE])
    stage = adapted(config)
    assert sum(one.numel() for one in stage.parameters() if one.requires_grad) == graph.trained_parameters()
    assert sum(one.numel() for one in stage.parameters()) == graph.parameters()


@pytest.fixture(params=("gpt", "llama", "phi3", "gpt_neox"))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelConfig, StageModule, Path]:
    """A model, its stage with products, and a folder with its tensors and a state of the optimizer."""
    config = config_of(request.param)
    stage = adapted(config)
    states = {"optimizer/model.lora_A.weight/exp_avg": torch.zeros(3)}
    (tmp_path / "saved").mkdir()
    save_file({**stage.state_dict(), **states}, tmp_path / "saved" / "model.safetensors")
    return config, stage, tmp_path / "saved"


def test_a_merged_model_computes_in_transformers_what_the_stage_computes(
    saved: tuple[ModelConfig, StageModule, Path], tmp_path: Path
) -> None:
    config, stage, folder = saved
    merged = ADAPTER.merged(SafetensorsFolder(folder), config, CHOICE)
    write_folder(tmp_path / "out", config, match_weights(merged, config, others=True))
    with torch.no_grad():
        ours = stage(inputs_of(config))
        plain = build_stage(config, range(config.layers + 2), 3, torch.float32).eval()(inputs_of(config))
    theirs = transformers_logits(tmp_path / "out", config, torch.float32)
    assert torch.allclose(ours, theirs, atol=2e-5)
    assert (ours - plain).abs().max() > 0.01


def test_an_adapter_has_the_names_and_keys_of_peft(
    saved: tuple[ModelConfig, StageModule, Path], tmp_path: Path
) -> None:
    config, stage, folder = saved
    source = SafetensorsFolder(folder)
    base = tmp_path / "base"
    written = write_adapter(tmp_path / "out", ADAPTER.adapter(source, config, CHOICE), source, base, {})
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    trained = {name: one for name, one in stage.named_parameters() if one.requires_grad}
    assert tensors.keys() == {f"base_model.model.{name}" for name in trained}
    assert all(torch.equal(tensors[f"base_model.model.{name}"], one) for name, one in trained.items())
    assert written.tensors == len(trained)
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["fan_in_fan_out"]) == (4, 6.0, config.family == "gpt")
    assert told["target_modules"] == sorted({one.name for one in block_products(config)})
    assert told["base_model_name_or_path"] == str(base)


def test_peft_computes_with_the_adapter_what_the_stage_computes(
    saved: tuple[ModelConfig, StageModule, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft accelerate")
    from transformers import AutoModelForCausalLM

    config, stage, folder = saved
    source = SafetensorsFolder(folder)
    write_folder(tmp_path / "base", config, match_weights(source, config, others=True))
    adapter = ADAPTER.adapter(source, config, CHOICE)
    write_adapter(tmp_path / "out", adapter, source, tmp_path / "base", {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    with torch.no_grad():
        ours = stage(inputs_of(config))
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "out")(inputs_of(config)).logits
    assert torch.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("family", ["gpt", "llama", "olmo2"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("chosen", [slice(None), slice(1), slice(-1, None)], ids=["all", "first", "last"])
def test_a_block_keeps_what_autograd_saves(family: str, dropout: float, chosen: slice) -> None:
    config = tiny("gpt", layers=3) if family == "gpt" else tiny_decoder(family)
    config = replace(config, sequence=64)
    targets = {one.name for one in block_products(config)[chosen]}
    choice = with_low_rank(4, 8.0, *targets, dropout=dropout)

    def saved_bytes(blocks: int) -> int:
        stage = build_stage(config, range(1, 1 + blocks), 0, torch.float32, methods=[choice])
        stream = torch.randn(2, config.sequence, config.hidden, requires_grad=True)
        return saved_by_autograd(lambda: stage(stream), (*stage.parameters(), *stage.buffers()))

    measured = saved_bytes(2) - saved_bytes(1)
    block, shape = trained_graph(config, [choice]).layers[2], Shape(2, config.sequence)
    predicted = 4 * block.kept(shape) + block.kept_bytes(shape)
    assert predicted == pytest.approx(measured, rel=0.02)


def test_dropout_leaves_out_its_share_in_training_alone() -> None:
    config = config_of("llama")
    plain, dropping = (
        build_stage(
            config, range(config.layers + 2), 3, torch.float32, methods=[with_low_rank(4, 6.0, dropout=one)]
        )
        for one in (0.0, 0.5)
    )
    for one, other in zip(plain.parameters(), dropping.parameters(), strict=True):
        if one.requires_grad:
            with torch.no_grad():
                one.copy_(other.normal_(0.0, 0.2))
    ids = inputs_of(config)
    assert not torch.allclose(plain.train()(ids), dropping.train()(ids), atol=1e-4)
    assert torch.equal(plain.eval()(ids), dropping.eval()(ids))


def test_a_rank_of_zeros_leaves_the_model_as_it_was() -> None:
    config = config_of("llama")
    begun = build_stage(config, range(config.layers + 2), 3, torch.float32, methods=[CHOICE]).eval()
    plain = build_stage(config, range(config.layers + 2), 3, torch.float32).eval()
    assert torch.equal(begun(inputs_of(config)), plain(inputs_of(config)))


@pytest.mark.parametrize("shares", [1, 2])
def test_a_stage_draws_no_values_that_are_read_later(
    tmp_path: Path, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = divisible("llama")
    layers = range(config.layers + 2)
    folder = model_folder(tmp_path / "base", config)
    save_file(whole_model(config, seed=9).state_dict(), folder / "model.safetensors")
    drawn: list[tuple[int, ...]] = []
    normal = torch.Tensor.normal_

    def seen(value: torch.Tensor, *given: float, generator: torch.Generator) -> torch.Tensor:
        # Libraries draw on the meta device, which costs nothing.
        if not value.is_meta:
            drawn.append(tuple(value.shape))
        return normal(value, *given, generator=generator)

    monkeypatch.setattr(torch.Tensor, "normal_", seen)
    found = []
    for filling in (Filling(), Filling(weights=True)):
        drawn.clear()
        stage = build_stage(
            config,
            layers,
            3,
            torch.float32,
            tensor_share=(shares - 1, shares),
            methods=[CHOICE],
            frozen_dtype=torch.bfloat16,
            filling=filling,
        )
        found.append((stage, len(drawn)))
        read_initial_weights(folder, config, {0: stage})
    (every, all_drawn), (stage, few_drawn) = found
    factors = [name for name, _ in stage.named_parameters() if ".lora_A." in name]
    assert few_drawn == len(factors) < all_drawn
    for (name, one), other in zip(stage.named_parameters(), every.parameters(), strict=True):
        assert one.dtype == other.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
        assert torch.equal(one, other), name


def test_a_checkpoint_fills_what_is_trained() -> None:
    config = config_of("llama")
    stage = build_stage(config, [0, 1], 3, torch.float32, methods=[CHOICE])
    assert isinstance(stage, StageModule)
    filled = {
        name for name, one in stage.named_parameters() if Filling(checkpoint=True).reads(stage, name, one)
    }
    assert filled == {name for name, _ in stage.named_parameters() if ".lora_" in name}
    plain = build_stage(config, [0, 1], 3, torch.float32)
    assert isinstance(plain, StageModule)
    assert all(Filling(checkpoint=True).reads(plain, name, one) for name, one in plain.named_parameters())
    assert not any(Filling().reads(plain, name, one) for name, one in plain.named_parameters())
