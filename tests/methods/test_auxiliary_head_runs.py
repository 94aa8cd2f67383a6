"""Runs with an auxiliary head: told, resumed to the same bits under another plan, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from asked_methods import with_head
from safetensors.torch import load_file

from weft.cli.main import run
from weft.describe.models import resolve_model
from weft.run.stages import build_stage
from weft.training.imports import read_initial_weights

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
pp = 2
dp = 1
micro_batch_size = 1
schedule = "1f1b"
then = {{ at_step = 1, pp = 1, dp = 2, micro_batch_size = 1, schedule = "1f1b" }}
[auxiliary-head]
after_block = 2
weight = 0.3
"""
HEAD = {"auxiliary_head.norm.weight", "auxiliary_head.norm.bias", "auxiliary_head.product.weight"}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)


def train(folder: Path, name: str, steps: int) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(RUN.format(folder=folder, steps=3))
    source = "--resume" if (folder / name).exists() else "--directory"
    assert run(["train", str(path), source, str(folder / name), "--steps", str(steps)]) == 0
    return folder / name


def losses(directory: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["auxiliary_loss"]) for row in rows]


def weights(directory: Path, newest: int = -1) -> dict[str, Any]:
    chosen = sorted((directory / "checkpoints").iterdir())[newest]
    return {name: value for file in chosen.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.processes
def test_a_head_moves_with_the_plan_resumes_to_the_same_bits_and_is_not_exported(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", 3)
    train(tmp_path, "parts", 2)
    parts = train(tmp_path, "parts", 3)
    assert losses(parts) == losses(whole)
    assert len({other for _, other in losses(whole)}) == 3
    kept, again = weights(whole), weights(parts)
    assert kept.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in kept.items())
    assert kept.keys() >= HEAD | {f"optimizer/{name}/exp_avg" for name in HEAD}
    # The later plan went on with the head that the first one had trained.
    for name in HEAD:
        before = weights(whole, 0)[name]
        assert 0.0 < (kept[name] - before).abs().max() < 1e-3
    assert '<section id="auxiliary-head"' in (parts / "report.html").read_text()

    assert run(["export", str(whole), str(tmp_path / "out")]) == 0
    exported = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert not any("auxiliary" in name for name in exported)
    begins_from(tmp_path / "out", exported)


def begins_from(folder: Path, exported: dict[str, Any]) -> None:
    """What is no part of the model keeps its initial values where the model's weights come from a folder."""
    config = resolve_model(str(folder), sequence=16)
    stage, fresh = (build_stage(config, range(6), 7, torch.float32, methods=[with_head(2)]) for _ in range(2))
    read_initial_weights(folder, config, {0: stage})
    given, drawn = stage.state_dict(), fresh.state_dict()
    assert all(torch.equal(given[name], drawn[name]) for name in HEAD)
    assert torch.equal(given["transformer.h.1.mlp.c_fc.weight"], exported["transformer.h.1.mlp.c_fc.weight"])
