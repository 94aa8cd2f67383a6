"""Runs with clipped micro-batches: told, and resumed to the same bits under another plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
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
