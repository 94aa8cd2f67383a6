"""Every file under examples/ is legal, and the loop of one's own learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.describe.run_file import load_run

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN_FILES = sorted(path for path in EXAMPLES.rglob("*.toml") if "runs" not in path.parts)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.parent.name)
def test_run_files_are_legal(path):
    assert load_run(path).model


@pytest.mark.processes
def test_a_loop_of_ones_own_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    plan = tmp_path / "plan.json"
    words = "plan gpt-1m --on this-machine --global-batch 16 --sequence 128 --pp 2 --dp 1 --out"
    assert run([*words.split(), str(plan)]) == 0
    script = str(EXAMPLES / "own-loop" / "own_loop.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [sys.executable, *launcher, script, str(plan)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", finished.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0
