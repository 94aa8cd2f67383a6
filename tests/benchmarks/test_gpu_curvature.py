"""The benchmark of K-FAC on a GPU: its parts run on a CPU, with the classes that there are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import curvature
import pytest
import torch

from weft.methods.kfac.linears import treated_in

FILE = Path(curvature.__file__).parent / "gpu" / "curvature.py"


def test_its_parts_run_again_and_again() -> None:
    spec = importlib.util.spec_from_file_location("gpu_curvature", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "gpu_curvature", module)
        spec.loader.exec_module(module)
    torch.manual_seed(0)
    work = module.work_of(treated_in(module.block_of(64, 16))[1], 32, "cpu")
    # The products of rows, their inverses, which assert that there are any, and their use.
    assert len(work) == 3
    for part in (*work, *work):
        part()
