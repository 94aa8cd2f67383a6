"""Folders of decoders come back as they were, with the keys and files that training leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoder_models import tiny_decoder
from hugging_face_jobs import model_folder, transformers_logits, whole_model, write_run, write_text
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weft.describe.models import CONFIG_FILE, resolve_model
from weft.describe.run_file import load_run
from weft.errors import InputError
from weft.training.checkpoint.tensor_folders import SafetensorsFolder
from weft.training.interchange.export import _kept_files
from weft.training.interchange.hugging_face import write_folder
from weft.training.interchange.imports import read_initial_weights
from weft.training.interchange.matching import match_weights, model_shapes

TYPES = ("mistral", "qwen3", "gemma2", "phi3", "gpt_neox", "olmo2", "granite", "cohere2", "qwen3_5_text")
MIXTURES = (
    "mixtral",
    "granitemoe",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "exaone_moe",
    "qwen3_next",
    "afmoe",
    "deepseek_v32",
    "laguna",
)
# What training does not change.
KEPT = {"max_position_embeddings": 48, "eos_token_id": 7, "attention_dropout": 0.25, "mine": {"a": [1]}}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_folder_of_weights_is_read_and_written_as_it_was(model_type: str, tmp_path: Path) -> None:
    described = tiny_decoder(model_type, tie_word_embeddings=False)
    folder = model_folder(tmp_path / "model", described, **KEPT)
    save_file(dict(whole_model(described, seed=5).state_dict()), folder / "model.safetensors")
    config = resolve_model(str(folder), sequence=32)
    model = whole_model(config, seed=99)
    read_initial_weights(folder, config, {0: model})
    tokens = torch.randint(config.vocabulary, (3, 32), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        logits = model(tokens)
    torch.testing.assert_close(logits, transformers_logits(folder, config, torch.float32))

    written = tmp_path / "out"
    write_folder(written, config, match_weights(SafetensorsFolder(folder), config))
    before, after = (json.loads((path / CONFIG_FILE).read_text()) for path in (folder, written))
    assert {**before, **{key: after[key] for key in ("architectures", "dtype")}} == after
    assert {key: after[key] for key in KEPT} == KEPT
    tensors = [load_file(path / "model.safetensors") for path in (folder, written)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


@pytest.mark.parametrize("tokenizer", ["bytes", "model"])
def test_files_of_generation_and_of_the_own_tokenizer_are_kept(tokenizer: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tiny_decoder("qwen3", vocab_size=256))
    texts = {"generation_config.json": '{"top_k": 3}', "special_tokens_map.json": "{}", "other.txt": "no"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    text = write_text(tmp_path / "text.txt")
    write_run(tmp_path / "run", folder, text, precision="fp32", weights=False)
    run = load_run(tmp_path / "run" / "run.toml")
    run = run.model_copy(update={"task": run.task.model_copy(update={"tokenizer": tokenizer})})
    kept = ["generation_config.json", "special_tokens_map.json"][: 2 if tokenizer == "model" else 1]
    assert _kept_files(run) == {name: texts[name] for name in kept}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_are_read_and_written_as_transformers_stores_them(model_type: str, tmp_path: Path) -> None:
    described = tiny_decoder(model_type, tie_word_embeddings=False)
    folder = model_folder(tmp_path / "model", described)
    made = CONFIG_MAPPING[model_type].from_dict(json.loads(described.record))
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for name, buffer in theirs.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_()
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").rename(folder / "model.safetensors")
    config = resolve_model(str(folder), sequence=32)
    model = whole_model(config, seed=99)
    read_initial_weights(folder, config, {0: model})
    state = theirs.state_dict()
    assert {name: value.shape for name, value in model.state_dict().items()}.keys() <= state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    written = tmp_path / "out"
    write_folder(written, config, match_weights(SafetensorsFolder(folder), config), file_bytes=100_000)
    before = load_file(folder / "model.safetensors")
    after = {name: one for file in written.glob("*.safetensors") for name, one in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())


def test_a_type_whose_files_have_other_names_is_refused_in_one_line(tmp_path: Path) -> None:
    config = tiny_decoder("kimi_linear")
    folder = model_folder(tmp_path / "model", config)
    with pytest.raises(InputError) as refused:
        match_weights(SafetensorsFolder(folder), config)
    assert len(refused.value.violations) == 1
    # `weft check` asks for the shapes of every trained model.
    assert model_shapes(config)


@pytest.mark.parametrize("lost", ["model.layers.0.block_sparse_moe.experts.3.w3.weight", "lm_head.weight"])
def test_a_missing_tensor_of_an_expert_is_named(lost: str, tmp_path: Path) -> None:
    config = tiny_decoder("mixtral", tie_word_embeddings=False)
    folder = model_folder(tmp_path / "model", config)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"].from_dict(json.loads(config.record)))
    theirs.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != lost}, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"{lost} is missing") as refused:
        match_weights(SafetensorsFolder(folder), config)
    assert len(refused.value.violations) == 1


def test_an_expert_of_a_number_out_of_range_is_named(tmp_path: Path) -> None:
    config = tiny_decoder("mixtral", num_hidden_layers=1, tie_word_embeddings=False)
    folder = model_folder(tmp_path / "model", config)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"].from_dict(json.loads(config.record)))
    theirs.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    far = "model.layers.0.block_sparse_moe.experts.999999999999.w1.weight"
    tensors[far] = tensors["model.layers.0.block_sparse_moe.experts.5.w1.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"experts\.6\.w1\.weight is missing"):
        match_weights(SafetensorsFolder(folder), config)
