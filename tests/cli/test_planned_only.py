"""A decoder that weft describes and does not train is planned, and refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import run

MIXTURE = {
    "model_type": "phimoe",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}
LINE = "model mixture: phimoe is planned only; weft does not train it yet"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    folder = tmp_path / "mixture"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nhf = "{folder}"\n[cluster]\nuse = "2xt4"\n')
    return path


def test_it_is_planned(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(run_file)]) == 0
    assert "mixture on 2xt4" in capsys.readouterr().out


def test_check_refuses_it_in_one_line(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(run_file)]) == 2
    assert capsys.readouterr().out.splitlines() == [LINE]


def test_train_refuses_it_and_writes_nothing(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(["train", str(run_file), "--directory", str(tmp_path / "run")]) == 2
    assert LINE in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
