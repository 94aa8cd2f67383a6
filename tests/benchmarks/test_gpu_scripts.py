"""Benchmarks for a GPU: their parts fit the classes that there are, which else a GPU alone would show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import harness
import pytest
import torch

from weft.methods.kfac.linears import treated_in

GPU = Path(harness.__file__).parent / "gpu"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One of them as a module; some have the name of another benchmark."""
    monkeypatch.syspath_prepend(str(GPU))
    # Of the folder above, under the name of a script here.
    monkeypatch.syspath_prepend(str(GPU.parent))
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"gpu_{name}", module)
    spec.loader.exec_module(module)
    return module


def test_the_parts_of_curvature_run_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("curvature", monkeypatch)
    torch.manual_seed(0)
    work = module.work_of(treated_in(module.block_of(64, 16))[1], 32, "cpu")
    # The products of rows, their inverses, which assert that there are any, and their use.
    assert len(work) == 3
    for part in (*work, *work):
        part()


def test_every_layout_of_the_grid_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("layout_grid", monkeypatch)
    for case in module.cases("cpu"):
        _, plan, _, prediction = module.prepare(module.arguments_of(case))
        assert {stage.recompute for stage in plan.stages} == {case["recompute"]}
        assert prediction.step_s > 0.0
