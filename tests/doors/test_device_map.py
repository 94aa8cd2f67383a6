"""Device maps of captured models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.describe.amount import Amount
from weft.describe.layer import Layer, Matmul, PassWork
from weft.describe.layer_graph import LayerGraph, chain_edges


def graph_file(folder: Path) -> Path:
    """A chain of modules with names, as a capture writes it."""
    one, size = Amount.of(1.0, batch=1), Amount.of(512.0)
    work = PassWork((Matmul(Amount.of(1.0), one, size, size),), one, 1)
    layers = tuple(
        Layer(
            name=name,
            kind=name,
            parameters=Amount.of(512.0 * 512.0),
            forward=work,
            backward_input=work,
            backward_weight=work,
            kept=Amount.of(512.0, batch=1),
            sent=Amount.of(512.0, batch=1),
        )
        for name in ("model.embed", "model.layers.0", "model.layers.1", "lm_head")
    )
    path = folder / "graph.json"
    graph = LayerGraph(name="four", layers=layers, edges=chain_edges(4), sequence=1, vocabulary=8)
    path.write_text(graph.to_json(), encoding="utf-8")
    return path


def test_each_module_has_the_device_of_its_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", str(graph_file(tmp_path)), "--on", "2xt4", "--precision", "fp16", "--global-batch", "4"]
    pinned = ["--planner", "m-topo", "--dp", "1", "--pp", "2"]
    assert run([*asked, *pinned, "--out", str(tmp_path / "plan.json")]) == 0
    capsys.readouterr()
    assert run([*asked, *pinned, "--emit", "device-map"]) == 0
    told = capsys.readouterr()
    places = json.loads(told.out)
    record = json.loads((tmp_path / "plan.json").read_text())
    stages = record.get("plan", record)["stages"]
    names = ["model.embed", "model.layers.0", "model.layers.1", "lm_head"]
    assert list(places) == names
    assert {
        names[layer]: stage["replicas"][0]["ranks"][0] for stage in stages for layer in stage["layers"]
    } == places
    assert len(set(places.values())) == 2
    assert "start: model = AutoModel.from_pretrained" in told.err


def test_models_without_modules_by_name_and_replicas_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt-1m", "--on", "2xt4", "--precision", "fp16", "--global-batch", "4"]
    assert run([*asked, "--dp", "2", "--emit", "device-map"]) == 2
    told = capsys.readouterr().err
    assert "gpt-1m has no modules by name; `weft capture` writes models that have them" in told
    assert "several replicas or ranks" in told
