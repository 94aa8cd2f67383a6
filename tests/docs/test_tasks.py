"""What the pages on one's own models show works: a trained model comes back as a plain module."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from installing import ROOT
from pool import WorkerPool
from pooled_runs import trained
from torch import nn

from weft.training.checkpoint.manifest import newest_complete
from weft.training.checkpoint.tensor_folders import SafetensorsFolder

RUN = """
[model]
build = "{build}"
[task]
kind = "image-classification"
data = "digits"
[train]
global_batch = 8
steps = 2
[plan]
pp = 2
dp = 1
schedule = "zb-h1"
"""
# As the page's module, but small, with a tied weight.
MODULE = """
import torch
from torch import nn

import weft


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.first, self.middle = nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64)
        self.last, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        middle = self.middle(torch.relu(self.first(self.flatten(inputs))))
        return self.head(torch.relu(self.last(torch.relu(middle))))


def build() -> tuple[nn.Module, torch.Tensor]:
    return Tied(), torch.zeros(1, 1, 8, 8)


def model() -> weft.CapturedModel:
    return weft.CapturedModel(*build(), level="module")
"""


def blocks(page: str) -> dict[str, str]:
    """The blocks of Python on a page that begin with the name of a file, by that name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.DOTALL)
    return dict(found)


def read_back(
    page: str, name: str, module: str, pool: WorkerPool, folder: Path, build: str
) -> dict[str, Any]:
    """Train a module's model, and run what a page shows for its weights; return the names it defines."""
    (folder / f"{name}.py").write_text(module)
    (folder / "run.toml").write_text(RUN.format(build=f"{name}:{build}"))
    trained(pool, folder / "run.toml", directory=folder / "runs" / "demo", packages=folder)
    names: dict[str, Any] = {}
    exec(compile(blocks(page)["weights"], page, "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, whose modules are found and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mymodel", "mymodule"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def checkpoint(folder: Path) -> SafetensorsFolder:
    path, _ = newest_complete(folder / "runs" / "demo" / "checkpoints")
    assert path is not None
    return SafetensorsFolder(path)


def test_a_trained_model_of_layers_comes_back_as_a_plain_module(
    worker_pool: WorkerPool, folder: Path
) -> None:
    module = read_back("tasks.md", "mymodel", blocks("tasks.md")["mymodel"], worker_pool, folder, "build")[
        "module"
    ]
    assert isinstance(module, nn.Sequential)
    saved = checkpoint(folder)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, saved.read(f"layers.{name}"), rtol=0, atol=0)
    assert module(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_trained_captured_module_gets_its_weights_back(worker_pool: WorkerPool, folder: Path) -> None:
    module = read_back("capture.md", "mymodule", MODULE, worker_pool, folder, "model")["module"]
    saved = checkpoint(folder)
    torch.testing.assert_close(module.first.weight.data, saved.read("shared.0"), rtol=0, atol=0)
    assert module.last.weight is module.first.weight
    stored = {name.split(".", 2)[2]: name for name in saved.shapes if name.startswith("layers.")}
    own = dict(module.named_parameters())
    assert {*own} - {*stored} == {"first.weight"}
    for name, where in stored.items():
        torch.testing.assert_close(own[name].data, saved.read(where), rtol=0, atol=0)
