"""A model in the working folder is found by every command that takes a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.cli.main import main

MODEL = """
import torch
from torch import nn

import weft


def build():
    layers = [lambda: nn.Linear(4, 8), lambda: nn.Linear(8, 3)]
    return weft.BlockModel(layers, example=torch.zeros(1, 4), classes=3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model_of_the_folder.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return left.value.code


@pytest.mark.usefixtures("folder")
def test_it_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "model_of_the_folder:build", "--on", "2xt4") == 0
    assert "model_of_the_folder:build on 2xt4" in capsys.readouterr().out


def test_and_from_a_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.toml").write_text(
        '[model]\nbuild = "model_of_the_folder:build"\n[task]\nkind = "a.b:Task"\n[cluster]\nuse = "2xt4"\n'
    )
    assert exit_code("simulate", "run.toml") == 0
    assert "model_of_the_folder:build" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_a_wrong_name_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "model_of_no_folder:build", "--on", "2xt4") == 2
    assert capsys.readouterr().err.splitlines() == [
        "weft: model.build: 'model_of_no_folder:build' cannot be imported: "
        "No module named 'model_of_no_folder' in this folder or among installed packages"
    ]
