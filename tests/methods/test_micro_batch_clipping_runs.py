"""Runs with clipped micro-batches: told, and resumed to the same bits under another plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import text_run, through_and_stopped

CLIP = """
then = { at_step = 1, pp = 1, dp = 2, micro_batch_size = 1, schedule = "1f1b" }
[clip]
micro = "quantile"
quantile = 0.5
samples = 1
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_bound_moves_with_the_plan_and_resumes_to_the_same_bits(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    whole, parts = through_and_stopped(
        worker_pool, tmp_path, text_run(tmp_path, CLIP, steps=3), steps=3, stop=2
    )
    told = [
        [
            (row["loss"], row["clip_bound"], row["clip_norms"])
            for row in map(json.loads, (one / "metrics.jsonl").read_text().splitlines())
        ]
        for one in (whole, parts)
    ]
    assert told[0] == told[1]
    for (_, _, before), (_, bound, _) in zip(told[0][:-1], told[0][1:], strict=True):
        assert bound in before
    assert '<section id="micro-batch-clipping"' in (parts / "report.html").read_text()


TWO_SOURCES = """
[model]
preset = "gpt-1m"
[task]
data = { "a.txt" = 1, "b.txt" = 1 }
sequence = 16
source_block = 2
[train]
global_batch = 8
steps = 2
[clip]
samples = 2
sources = 2
[plan]
dp = 1
pp = 1
tp = 1
micro_batch_size = 2
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_sources_have_bounds_of_their_own(tmp_path: Path, worker_pool: WorkerPool) -> None:
    for name, text in (("a", "count the sheep of the hills\n"), ("b", "7 + 8 = 15, 9 + 9 = 18\n")):
        (tmp_path / f"{name}.txt").write_text(text * 200)
    (tmp_path / "run.toml").write_text(TWO_SOURCES)
    run = trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run")
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        owners = row["sample_sources"][::2]
        assert len(owners) == len(row["clip_norms"]) == len(row["clip_bounds"]) == 4
        for owner, bound in zip(owners, row["clip_bounds"], strict=True):
            norms = [norm for norm, own in zip(row["clip_norms"], owners, strict=True) if own == owner]
            assert bound == min(norms)
    head, *lines = (run / "micro-batch-clipping.csv").read_text().splitlines()
    assert head == "step,micro_batch,norm,bound,suppressed,source"
    assert len(lines) == 8


STAGES = """
[model]
preset = "gpt-1m"
[goal]
contract = "empirical"
[task]
data = "a.txt"
sequence = 16
[train]
global_batch = 8
steps = 2
[clip]
samples = 2
scope = "stage"
layers_per_stage = [3, 3]
[plan]
dp = 1
pp = 2
tp = 1
micro_batch_size = 2
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_stages_with_norms_of_their_own_tell_their_means(tmp_path: Path, worker_pool: WorkerPool) -> None:
    (tmp_path / "a.txt").write_text("which clips all of it " * 200)
    (tmp_path / "run.toml").write_text(STAGES)
    run = trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run")
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        assert row["clip_bound"] > 0
        assert 0 < row["clipped"] < 1
        assert row["dropped"] == 0
        assert "clip_norms" not in row
    assert "2 samples, to min, stage by stage" in (run / "report.html").read_text()
