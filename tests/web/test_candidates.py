"""Rows of the ranked table: memory is that of the device that is filled most, among those that are used."""

from __future__ import annotations

from dataclasses import replace

import weft
from weft.planning.planners import Candidate, Verdict
from weft.web.candidates import candidate_row


def test_the_fullest_device_is_the_one_with_the_largest_share() -> None:
    job = weft.plan(
        model="gpt-1m", on="1xa100-80gb+1xt4", global_batch=4, precision="fp16", pp=2, schedule="1f1b"
    ).job
    cluster = job.problem.job.cluster
    assert job.ranking is not None
    best = job.ranking.fitting[0]

    def row(*peak_bytes: int) -> dict[str, object]:
        held = job.prediction.model_copy(update={"peak_bytes": peak_bytes})
        return candidate_row(replace(best, prediction=held, peak_bytes=max(peak_bytes)), cluster)

    large, small = (cluster.device_of(rank).memory_bytes for rank in (0, 1))
    assert large > small
    assert (row(large // 2, small // 4)["peak_bytes"], row(large // 2, small // 4)["memory_bytes"]) == (
        large // 2,
        large,
    )
    assert (row(large // 9, small - 1)["peak_bytes"], row(large // 9, small - 1)["memory_bytes"]) == (
        small - 1,
        small,
    )
    # The small device is left out.
    assert row(large // 2)["memory_bytes"] == large
    unknown = Candidate(layout=best.layout, verdict=Verdict.TOO_BIG, reason="", peak_bytes=7)
    assert candidate_row(unknown, cluster)["memory_bytes"] == small
    assert candidate_row(replace(unknown, peak_bytes=0), cluster)["peak_bytes"] is None
