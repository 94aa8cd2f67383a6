"""Weights from elsewhere: what fits is taken bit by bit, and all that does not is said at once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hugging_face_jobs import FAMILIES, inputs_of, model_folder, small, transformers_logits, whole_model
from safetensors.torch import save_file

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.training.checkpoint.tensor_folders import SafetensorsFolder
from weft.training.interchange.hugging_face_families import hugging_face_family
from weft.training.interchange.imports import import_weights, read_initial_weights

# What other versions and other heads of `transformers` stored, by family.
SUPERFLUOUS = {
    "gpt": ("h.0.attn.bias", "h.0.attn.masked_bias"),
    "llama": ("layers.0.self_attn.rotary_emb.inv_freq",),
    "bert": ("embeddings.position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.bias"),
    "vit": ("pooler.dense.weight", "vit.pooler.dense.bias"),
    "resnet": (),
}


def saved(path: Path, config: ModelConfig, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A folder with a configuration and these tensors, or the model's own."""
    folder = model_folder(path, config)
    save_file(
        tensors if tensors is not None else dict(whole_model(config).state_dict()),
        folder / "model.safetensors",
    )
    return folder


def tensors_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    return dict(whole_model(config).state_dict())


def read_whole(
    folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    model = whole_model(config, seed=99, dtype=dtype)
    read_initial_weights(folder, config, {0: model})
    return dict(model.state_dict())


def require_same(found: dict[str, torch.Tensor], config: ModelConfig) -> None:
    expected = tensors_of(config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_reads_its_own_tensors_and_no_others(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(family)
    folder = saved(tmp_path / "model", config)
    read: list[str] = []
    original = SafetensorsFolder.read
    monkeypatch.setattr(
        SafetensorsFolder, "read", lambda self, name: read.append(name) or original(self, name)
    )
    found: dict[str, torch.Tensor] = {}
    for layers in ([0, 1], [2, 3]):
        stage = build_stage(config, layers, 99, torch.float32)
        read.clear()
        read_initial_weights(folder, config, {0: stage})
        assert sorted(read) == sorted(stage.state_dict())
        found |= stage.state_dict()
    require_same(found, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_precision_is_the_runs(family: str, tmp_path: Path) -> None:
    config = small(family)
    halves = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in tensors_of(config).items()
    }
    folder = saved(tmp_path / "model", config, halves)
    for name, value in read_whole(folder, config, torch.float64).items():
        assert value.dtype == (torch.float64 if value.is_floating_point() else torch.int64)
        assert torch.equal(value, halves[name].to(value.dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_model_without_a_head_and_saved_buffers_are_understood(
    family: str, tmp_path: Path
) -> None:
    config = small(family)
    names = hugging_face_family(config)
    stored = {
        names.stored(name).removeprefix(names.prefix): value for name, value in tensors_of(config).items()
    }
    stored |= {name: torch.ones(3) for name in SUPERFLUOUS[family]}
    require_same(read_whole(saved(tmp_path / "model", config, stored), config), config)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_a_tied_head_may_be_stored_but_must_be_the_embedding(family: str, tmp_path: Path) -> None:
    config = small(family, tied=True)
    tensors = tensors_of(config)
    copies = {copy: tensors[kept].clone() for copy, kept in hugging_face_family(config).tied.items()}
    require_same(read_whole(saved(tmp_path / "bare", config), config), config)
    require_same(read_whole(saved(tmp_path / "stored", config, {**tensors, **copies}), config), config)
    for number, name in enumerate(copies):
        changed = {**tensors, **copies, name: copies[name] + 1}
        with pytest.raises(InputError, match=rf"{name} differs .* \(nearest valid: tie_word_embeddings = f"):
            read_whole(saved(tmp_path / f"other-{number}", config, changed), config)


def test_a_shorter_sequence_takes_the_first_positions(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", small("gpt"))
    shorter = replace(small("gpt"), sequence=5)
    found = read_whole(folder, shorter)
    positions = tensors_of(small("gpt"))["transformer.wpe.weight"]
    assert torch.equal(found["transformer.wpe.weight"], positions[:5])


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    config = small("gpt")
    tensors = tensors_of(config)
    del tensors["transformer.h.1.ln_2.weight"], tensors["lm_head.weight"]
    tensors["transformer.h.0.mlp.c_fc.weight"] = torch.ones(3, 4)
    tensors["transformer.wpe.weight"] = torch.ones(5, 16)
    tensors["transformer.h.7.ln_1.bias"] = torch.ones(16)
    with pytest.raises(InputError) as refused:
        read_whole(saved(tmp_path / "model", config, tensors), config)
    lines = sorted(str(refused.value).replace(str(tmp_path), "").splitlines())
    assert lines == [
        "/model: lm_head.weight is missing",
        "/model: transformer.h.0.mlp.c_fc.weight has the shape 3 x 4, the model's has 16 x 24",
        "/model: transformer.h.1.ln_2.weight is missing (nearest valid: transformer.h.1.ln_1.weight)",
        "/model: transformer.h.7.ln_1.bias is not a tensor of this model",
        "/model: transformer.wpe.weight has the shape 5 x 16, the model's has 8 x 16",
    ]


@pytest.mark.parametrize(
    ("family", "changes", "keys"),
    [
        ("gpt", {"activation_function": "relu", "scale_attn_weights": False}, 2),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, 1),
        ("llama", {"hidden_act": "gelu"}, 1),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, 1),
    ],
)
def test_a_model_that_computes_something_else_is_refused(
    family: str, changes: dict[str, object], keys: int, tmp_path: Path
) -> None:
    config = small(family)
    folder = model_folder(tmp_path / "model", config, **changes)
    save_file(tensors_of(config), folder / "model.safetensors")
    with pytest.raises(InputError, match="is not what this model computes") as refused:
        read_whole(folder, config)
    assert len(refused.value.violations) == keys


def test_spellings_of_the_same_function_are_one(tmp_path: Path) -> None:
    config = small("gpt")
    folder = model_folder(tmp_path / "model", config, activation_function="gelu_new", attn_pdrop=0.1)
    save_file(tensors_of(config), folder / "model.safetensors")
    require_same(read_whole(folder, config), config)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt", {"layer_norm_epsilon": 0.01}),
        ("llama", {"rms_norm_eps": 0.01, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        # As versions of `transformers` before 5 wrote it.
        ("llama", {"rms_norm_eps": 0.01, "rope_theta": 500.0, "rope_parameters": None}),
    ],
)
def test_the_constants_of_a_configuration_are_computed_with(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model", small(family), **changes)
    save_file(tensors_of(small(family)), folder / "model.safetensors")
    config = resolve_model(str(folder))
    model = whole_model(config, seed=99)
    read_initial_weights(folder, config, {0: model})
    logits = model(inputs_of(config)).detach()
    assert torch.equal(logits, transformers_logits(folder, config, torch.float32))
    assert not torch.allclose(logits, whole_model(small(family))(inputs_of(config)), atol=1e-4)
    import_weights(folder, tmp_path / "out", str(folder))
    assert torch.equal(logits, transformers_logits(tmp_path / "out", config, torch.float32))
    again = resolve_model(str(tmp_path / "out"))
    assert replace(again, name=config.name, record=config.record) == config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["", "model.", "state.app."])
def test_a_checkpoint_of_torch_becomes_a_folder(family: str, prefix: str, tmp_path: Path) -> None:
    config = small(family)
    shape = model_folder(tmp_path / "shape", config)
    content = {f"{prefix}{name}": value for name, value in tensors_of(config).items()}
    content |= {f"optimizer.{name}.exp_avg": value * 0 for name, value in tensors_of(config).items()}
    for step in (20, 100):
        values = {name: value * (step == 100) for name, value in content.items()}
        dcp.save({**values, "step": step}, checkpoint_id=tmp_path / "steps" / f"step-{step}", no_dist=True)
    written, left_out = import_weights(tmp_path / "steps", tmp_path / "out", str(shape))
    assert written.tensors == len(tensors_of(config))
    assert left_out == len(tensors_of(config)) + 1
    require_same(read_whole(tmp_path / "out", config), config)
    ours = whole_model(config)(inputs_of(config)).detach()
    assert torch.equal(ours, transformers_logits(tmp_path / "out", config, torch.float32))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(kind: torch.dtype, tmp_path: Path) -> None:
    config = small("gpt")
    tensors = {**tensors_of(config), "transformer.h.0.mlp.c_fc.weight": torch.ones(16, 24).to(kind)}
    folder = saved(tmp_path / "model", config, tensors)
    message = rf"c_fc.weight is stored as {str(kind)[6:]}; quantised weights are not read"
    with pytest.raises(InputError, match=message):
        read_whole(folder, config)
    with pytest.raises(InputError, match=message):
        import_weights(folder, tmp_path / "out", str(folder))
    assert not (tmp_path / "out").exists()


def test_what_an_import_refuses_leaves_nothing(tmp_path: Path) -> None:
    config = small("gpt")
    shape = model_folder(tmp_path / "shape", config)
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(InputError) as refused:
        import_weights(tmp_path / "other", tmp_path / "out", str(shape))
    assert len(refused.value.violations) == len(tensors_of(config))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="only pickled weights"):
        import_weights(tmp_path / "bin", tmp_path / "out", str(shape))
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(InputError, match="not a folder"):
        import_weights(tmp_path / "other", tmp_path / "out", str(shape))
