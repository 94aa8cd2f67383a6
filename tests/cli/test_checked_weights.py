"""`weft check` says of the weights that a run starts from what `weft train` says of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hugging_face_jobs import model_folder, small, whole_model
from safetensors.torch import save_file

from weft.cli.main import run
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.training.interchange.imports import read_initial_weights

RUN = """
[model]
hf = "{folder}"
weights = true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its weights, as `transformers` writes them."""
    path = model_folder(tmp_path / "model", small("llama"))
    save_file(dict(whole_model(small("llama")).state_dict()), path / "model.safetensors")
    return path


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    path = folder.parent / "run.toml"
    path.write_text(RUN.format(folder=folder))
    code = run(["check", str(path)])
    return code, capsys.readouterr().out.splitlines()


def trained(folder: Path) -> list[str]:
    """What a rank of a run says that reads these weights."""
    config = resolve_model(str(folder))
    try:
        read_initial_weights(folder, config, {0: whole_model(config)})
    except InputError as error:
        return [str(violation) for violation in error.violations]
    return []


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(whole_model(small("llama")).state_dict(), folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def of_another_model(folder: Path) -> None:
    other = dict(whole_model(small("llama")).state_dict())
    other["model.norm.weight"] = torch.ones(3)
    del other["lm_head.weight"]
    save_file(other, folder / "model.safetensors")


def indexed_but_absent(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')


def with_no_activation(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"no such function"'))


def test_a_model_that_cannot_be_built_is_refused_without_weights(folder, capsys):
    with_no_activation(folder)
    path = folder.parent / "run.toml"
    path.write_text(RUN.format(folder=folder).replace("weights = true", "weights = false"))
    assert run(["check", str(path)]) == 2
    [line] = capsys.readouterr().out.splitlines()
    assert "transformers refuses its config.json" in line


def test_weights_that_can_be_trained_on_are_good(folder, capsys):
    assert trained(folder) == []
    assert checked(folder, capsys) == (0, [f"{folder.parent / 'run.toml'}: good"])


@pytest.mark.parametrize(
    "spoil", [only_pickled, cut_off, of_another_model, indexed_but_absent, with_no_activation]
)
def test_what_training_refuses_is_refused(folder, capsys, spoil: Callable[[Path], None]):
    spoil(folder)
    refusals = trained(folder)
    assert refusals
    assert checked(folder, capsys) == (2, refusals)


@pytest.mark.parametrize("spoil", [only_pickled, indexed_but_absent])
def test_without_torch_the_files_are_still_looked_at(folder, capsys, monkeypatch, spoil):
    spoil(folder)
    refusals = trained(folder)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert checked(folder, capsys) == (2, refusals)


def test_weights_that_are_not_started_from_do_not_matter(folder, capsys):
    only_pickled(folder)
    path = folder.parent / "run.toml"
    path.write_text(RUN.format(folder=folder).replace("true", "false"))
    assert run(["check", str(path)]) == 0


def test_looking_at_the_files_needs_no_torch():
    module = "weft.training.interchange.weight_files"
    code = f"import sys, {module}; assert not {{'torch', 'safetensors'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
