"""The ranked table: figures and whole reasons; memory is that of the fullest device among those in use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cli.tables.printed import text_of

import weft
from weft.cli.tables.candidates import candidate_row, plans_table
from weft.planning.planners import Candidate, Verdict


def test_the_fullest_device_is_the_one_with_the_largest_share() -> None:
    job = weft.plan(
        model="gpt-1m", on="1xa100-80gb+1xt4", global_batch=4, precision="fp16", pp=2, schedule="1f1b"
    ).job
    cluster = job.problem.job.cluster
    assert job.ranking is not None
    best = job.ranking.fitting[0]

    def row_of(*peak_bytes: int) -> dict[str, object]:
        held = job.prediction.model_copy(update={"peak_bytes": peak_bytes})
        return candidate_row(replace(best, prediction=held, peak_bytes=max(peak_bytes)), cluster)

    large, small = (cluster.device_of(rank).memory_bytes for rank in (0, 1))
    assert large > small
    assert (row_of(large // 2, small // 4)["peak_bytes"], row_of(large // 2, small // 4)["memory_bytes"]) == (
        large // 2,
        large,
    )
    assert (row_of(large // 9, small - 1)["peak_bytes"], row_of(large // 9, small - 1)["memory_bytes"]) == (
        small - 1,
        small,
    )
    # The small device is left out.
    assert row_of(large // 2)["memory_bytes"] == large
    unknown = Candidate(layout=best.layout, verdict=Verdict.TOO_BIG, reason="", peak_bytes=7)
    assert candidate_row(unknown, cluster)["memory_bytes"] == small
    assert candidate_row(replace(unknown, peak_bytes=0), cluster)["peak_bytes"] is None


def row(**changes: Any) -> dict[str, Any]:
    full = {
        "name": "pp 2 x dp 1",
        "step_s": 0.1,
        "low": 0.09,
        "high": 0.11,
        "peak_bytes": 10**9,
        "memory_bytes": 10**10,
        "fits": True,
        "reason": "the fastest",
    }
    return full | changes


@pytest.mark.parametrize("width", [80, 140])
def test_every_plan_shows_its_figures_and_its_whole_reason(width: int) -> None:
    reason = "needs 266 GB on rank 0, which has 80.0 GB: more pipeline devices or smaller micro-batches"
    rows = [row(name="a [b]"), row(step_s=None, peak_bytes=None, fits=False, reason=reason)]
    lines = text_of(plans_table(rows), width).splitlines()
    assert lines[1].split()[0] == "1"
    for figure in ("100 ms", "90.0 ms - 110 ms", "1.00 GB (10%)", "a [b]"):
        assert figure in lines[1]
    assert lines[2].strip() == "the fastest"
    assert lines[3].split()[:4] == ["2", "-", "-", "-"]
    assert " ".join(" ".join(lines[4:]).split()) == reason
