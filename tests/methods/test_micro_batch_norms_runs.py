"""A run that tells norms of micro-batches: recorded, reported, compared, and resumed to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.cli.main import run
from weft.describe.run_file import load_run
from weft.errors import InputError
from weft.planning.planned import plan_run

RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{folder}/text.txt"
sequence = 16
[train]
global_batch = 4
steps = {steps}
[plan]
pp = {pp}
dp = 1
micro_batch_size = 1
schedule = "1f1b"
[report]
micro_batch_norms = true
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)


def train(folder: Path, name: str, steps: int) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(RUN.format(folder=folder, steps=4, pp=2))
    source = "--resume" if (folder / name).exists() else "--directory"
    assert run(["train", str(path), source, str(folder / name), "--steps", str(steps)]) == 0
    return folder / name


def norms(directory: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["micro_batch_norms"] for row in rows]


def weights(directory: Path) -> dict[str, Any]:
    newest = max((directory / "checkpoints").iterdir())
    return {name: value for file in newest.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.processes
def test_a_resumed_run_tells_the_same_and_ends_with_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path, "whole", 4)
    train(tmp_path, "parts", 2)
    parts = train(tmp_path, "parts", 4)
    assert [len(row) for row in norms(whole)] == [4] * 4
    assert norms(parts) == norms(whole)
    kept, again = weights(whole), weights(parts)
    assert kept.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in kept.items())
    assert '<section id="micro-batch-norms"' in (parts / "report.html").read_text()
    capfd.readouterr()
    assert run(["compare", str(parts), "--json"]) == 0
    assert "micro_batch_norms" in capfd.readouterr().out


def test_copies_of_a_weight_on_several_stages_are_refused_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tied.toml"
    path.write_text(RUN.format(folder=tmp_path, steps=2, pp=2).replace("gpt-1m", "gpt2"))
    with pytest.raises(InputError) as refused:
        plan_run(load_run(path))
    [line] = str(refused.value).splitlines()
    assert "micro-batch-norms: 2 stages have a weight in common" in line
    assert "nearest pp: 1" in line
