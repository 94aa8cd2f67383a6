"""`weft capture` writes layers that `weft plan` takes as a model; `weft train` refuses them in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.plan_file import load_plan_file

MODELS = """
import torch
from torch import nn

import weft


def pair():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 4)


def model():
    return weft.CapturedModel(*pair())


def broken():
    raise ValueError("no such thing")


def nothing():
    return 3


class Guarded(nn.Linear):
    def forward(self, inputs):
        value = super().forward(inputs)
        return value if value.sum() > 0 else -value


def guarded():
    return Guarded(4, 4), torch.zeros(1, 4)


class Task:
    def batch(self, samples):
        return samples, samples

    def loss(self, outputs, targets):
        return outputs.sum()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "captured_in_folder.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("captured_in_folder", None)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    record: dict[str, object] = json.loads(capsys.readouterr().out)
    return record


@pytest.mark.parametrize("function", ["pair", "model"])
def test_its_file_is_planned_like_the_function(
    function: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"captured_in_folder:{function}"
    told = answer(capsys, "capture", name, "-o", "graph.json")
    assert (told["layers"], told["edges"], told["parameters"]) == (3, 2, 67)
    graph = LayerGraph.from_json((folder / "graph.json").read_text())
    assert graph.name == name
    assert resolve_model("graph.json").family == "captured"
    options = ("--on", "4xv100-16gb", "--global-batch", "8", "--out")
    assert run(["plan", "graph.json", *options, "of_file.json"]) == 0
    of_file = load_plan_file(folder / "of_file.json")
    assert of_file.plan.model == name
    if function == "model":
        assert run(["plan", name, *options, "of_function.json"]) == 0
        assert load_plan_file(folder / "of_function.json").plan == of_file.plan
    # The plan's file has the layers, too.
    (folder / "graph.json").unlink()
    assert run(["show", "of_file.json"]) == run(["simulate", "of_file.json"]) == 0


def test_it_prints_sums_and_the_largest_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "captured_in_folder:pair", "--level", "operator"]) == 0
    out = capsys.readouterr().out
    assert "captured_in_folder:pair by torch.export: 3 layers, 2 edges, 67 parameters" in " ".join(
        out.split()
    )
    assert out.splitlines()[-3].split() == ["0.linear", "linear", "40", "64", "16", "B"]


REFUSED = {
    ("captured_in_folder:broken",): "capture: 'captured_in_folder:broken' fails: ValueError: no such thing "
    "(captured_in_folder.py, line 17)",
    ("captured_in_folder:nothing",): "returned int; needed: a module and an example of its inputs",
    (
        "captured_in_folder:absent",
    ): "cannot be imported: module 'captured_in_folder' has no attribute 'absent'",
    (
        "captured_in_folder",
    ): "'captured_in_folder' is neither of the form package.module:function nor an ONNX file",
    ("captured_in_folder:pair", "--level", "layer"): "--level: 'layer' is not one of block, module, operator",
    ("captured_in_folder:guarded",): "its control flow or sizes depend on values of tensors "
    "(captured_in_folder.py, line 27)",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_it_refuses_in_one_line(
    arguments: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["capture", *arguments, "-o", "graph.json"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert REFUSED[arguments] in line
    assert not (folder / "graph.json").exists()


def test_a_file_of_layers_is_not_trained_or_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["capture", "captured_in_folder:pair", "-o", "graph.json"]) == 0
    (folder / "run.toml").write_text(
        '[model]\nhf = "graph.json"\n[task]\nkind = "captured_in_folder:Task"\n'
        '[cluster]\nuse = "this-machine"\n'
    )
    capsys.readouterr()
    assert run(["train", "run.toml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "model captured_in_folder:pair: a file of layers has no code to train; name the function that builds "
        'it (nearest valid: [model] build = "package.module:function")'
    )
    assert run(["measure", "graph.json"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "a file of layers has no code to measure" in line


def test_another_file_is_refused_with_the_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "graph.json").write_text('{"layers": [], "edges": [], "version": 2}')
    assert run(["plan", "graph.json", "--on", "2xt4"]) == 2
    assert capsys.readouterr().err == "weft: graph.json: version 2 is not 1\n"
