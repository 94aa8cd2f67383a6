"""A run whose stages form a graph and split micro-batches: trained, compared, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
from stopped_runs import through_and_stopped

from weft.cli.main import run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_home")]

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
splits = [1, 2, 4, 1]
"""


def test_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_pool: WorkerPool
) -> None:
    through, _ = through_and_stopped(worker_pool, tmp_path, RUN, steps=4, stop=2)
    stages = json.loads((through / "plan.json").read_text())["stages"]
    assert [stage.get("splits", 1) for stage in stages] == [1, 2, 4, 1]
    capsys.readouterr()
    assert run(["compare", str(through)]) == 0
    assert "0 only in predicted, 0 only in measured" in capsys.readouterr().out
