"""A run of two towers side by side: trained, evaluated, resumed to the same bits, and with another plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import through_and_stopped

from weft.cli.main import run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_home")]

RUN = """
[model]
preset = "mmt-tiny"
[task]
kind = "multimodal-classification"
[train]
global_batch = 32
steps = 40
[plan]
"""
SIDE_BY_SIDE = 'pp = 2\ndp = 1\nloops = 2\nschedule = "breadth-first"\nmicro_batch_size = 8\n'
REPLICAS = "pp = 1\ndp = 2\nmicro_batch_size = 8\n"


def test_a_stopped_run_goes_on_to_the_same_bits_and_with_another_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_pool: WorkerPool
) -> None:
    through, stopped = through_and_stopped(worker_pool, tmp_path, RUN + SIDE_BY_SIDE, steps=40, stop=30)
    summary = json.loads((through / "summary.json").read_text())
    assert summary["final_loss"] < 0.7 * summary["first_loss"]
    assert summary["final_metrics"]["accuracy"] > 0.6
    other = tmp_path / "replicas.toml"
    other.write_text(RUN + REPLICAS)
    trained(worker_pool, other, resume=stopped, steps=44)
    trained(worker_pool, tmp_path / "run.toml", resume=through, steps=44)
    losses = [json.loads((one / "result.json").read_text())["final_loss"] for one in (stopped, through)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    capsys.readouterr()
    assert run(["compare", str(through)]) == 0
    assert "0 only in predicted, 0 only in measured" in capsys.readouterr().out
