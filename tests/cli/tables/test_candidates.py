"""The ranked table: figures and whole reasons; memory is that of the fullest device among those in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cli.tables.printed import text_of

import weft
from weft.cli.tables.candidates import plans_table
from weft.describe.cluster import Cluster
from weft.describe.units import format_bytes
from weft.planning.advice import Advised
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate, Verdict
from weft.planning.ties import Standing


def two_kinds() -> PlannedJob:
    """A plan on a large device and a small one."""
    pins = {"pp": 2, "schedule": "1f1b"}
    return weft.plan(model="gpt-1m", on="1xa100-80gb+1xt4", global_batch=4, precision="fp16", **pins).job


def best_of(job: PlannedJob) -> Candidate:
    assert job.ranking is not None
    return job.ranking.fitting[0]


def table(candidates: list[Candidate], cluster: Cluster, width: int = 120) -> list[str]:
    standing = Standing(None, "")
    shown = [Advised(candidate=one, standing=standing, smallest_change=None) for one in candidates]
    return text_of(plans_table(shown, cluster), width).splitlines()


def test_the_fullest_device_is_the_one_with_the_largest_share() -> None:
    job = two_kinds()
    cluster, best = job.problem.job.cluster, best_of(job)

    def peak(*peak_bytes: int) -> str:
        held = job.prediction.model_copy(update={"peak_bytes": peak_bytes})
        return table([replace(best, prediction=held, peak_bytes=max(peak_bytes))], cluster)[1]

    large, small = (cluster.device_of(rank).memory_bytes for rank in (0, 1))
    assert large > small
    assert f" {format_bytes(large // 2)} (50%) " in peak(large // 2, small // 4)
    assert f" {format_bytes(small * 3 // 4)} (75%) " in peak(large // 9, small * 3 // 4)
    # The small device is left out.
    assert f" {format_bytes(large // 2)} (50%) " in peak(large // 2)
    unknown = Candidate(layout=best.layout, verdict=Verdict.TOO_BIG, reason="", peak_bytes=small // 2)
    assert f" {format_bytes(small // 2)} (50%) " in table([unknown], cluster)[1]
    assert table([replace(unknown, peak_bytes=0)], cluster)[1].split()[:4] == ["1", "-", "-", "-"]


@pytest.mark.parametrize("width", [80, 140])
def test_every_plan_shows_its_figures_and_its_whole_reason(width: int) -> None:
    job = two_kinds()
    cluster = job.problem.job.cluster
    steps = {"step_s": 0.1, "step_low_s": 0.09, "step_high_s": 0.11, "peak_bytes": (10**9, 10**8)}
    fits = replace(best_of(job), prediction=job.prediction.model_copy(update=steps), reason="as [b]")
    reason = "needs 266 GB on rank 0, which has 80.0 GB: more pipeline devices or smaller micro-batches"
    refused = Candidate(layout=fits.layout, verdict=Verdict.REFUSED, reason=reason)
    lines = table([fits, refused], cluster, width)
    assert lines[1].split()[0] == "1"
    for figure in ("100 ms", "90.0 ms - 110 ms", "1.00 GB (1%)"):
        assert figure in lines[1]
    rows = " ".join(" ".join(lines).split())
    assert f"{fits.words} as [b] 2 - - - {refused.words} {reason}" in rows
