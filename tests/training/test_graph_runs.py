"""A run whose stages form a graph and split micro-batches: trained, compared, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.cli.main import run

pytestmark = pytest.mark.processes

RUN = """
[model]
build = "own_models:diamond"
[task]
kind = "image-classification"
[train]
global_batch = 16
steps = 4
[plan]
pp = 2
dp = 1
loops = 2
schedule = "breadth-first"
micro_batch_size = 4
splits = {splits}
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=":")


def train(folder: Path, name: str, *, splits: list[int], steps: int = 4) -> Path:
    path, directory = folder / f"{name}.toml", folder / name
    path.write_text(RUN.format(splits=splits))
    source = "--resume" if directory.exists() else "--directory"
    assert run(["train", str(path), source, str(directory), "--steps", str(steps)]) == 0
    return directory


def weights(directory: Path) -> dict[str, Any]:
    newest = max((directory / "checkpoints").iterdir())
    return {name: value for file in newest.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    through = train(tmp_path, "through", splits=[1, 2, 4, 1])
    train(tmp_path, "stopped", splits=[1, 2, 4, 1], steps=2)
    stopped = train(tmp_path, "stopped", splits=[1, 2, 4, 1])
    expected, found = weights(through), weights(stopped)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    stages = json.loads((through / "plan.json").read_text())["stages"]
    assert [stage.get("splits", 1) for stage in stages] == [1, 2, 4, 1]
    capsys.readouterr()
    assert run(["compare", str(through)]) == 0
    assert "0 only in predicted, 0 only in measured" in capsys.readouterr().out
