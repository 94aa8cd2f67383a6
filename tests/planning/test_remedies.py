"""Remedies: each makes the job fit, and a job that nothing helps gets none."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from weft.describe.run_file import run_of_keywords
from weft.planning.cluster_changes import changed_cluster
from weft.planning.nothing_fits import NothingFitsError
from weft.planning.planned import plan_run
from weft.planning.planners import Verdict
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.remedies import Remedy, remedies
from weft.planning.what_if import on_cluster
from weft.progress import WorkDone

# One runner searches for all of them.
pytestmark = pytest.mark.xdist_group("remedies")

GIB = 2**30


@cache
def remedies_of(
    model: str, on: str, precision: str, **pins: object
) -> tuple[NothingFitsError, dict[str, Remedy]]:
    run = run_of_keywords(model=model, on=on, global_batch=8, sequence=1024, precision=precision, pins=pins)
    with pytest.raises(NothingFitsError) as refused:
        plan_run(run)
    told: list[WorkDone] = []
    found = {one.change: one for one in remedies(run, refused.value, report=told.append)}
    done = [one.done for one in told]
    # A job without remedies ends before anything is tried.
    assert done == list(range(told[0].total + 1) if told else ())
    return refused.value, found


def test_each_remedy_fits_where_the_job_does_not(tmp_path: Path) -> None:
    error, found = remedies_of("llama-7b", "4xt4", precision="fp16")
    assert not error.ranking.fitting
    for one in found.values():
        assert one.best.verdict is Verdict.FITS
        assert f"{one.change}: a step of " in one.words
        assert one.best.words in one.words
    (more,) = [change for change in found if " more t4 " in change]
    grown = found[more].problem.job.cluster.ranks
    assert grown > 4
    assert grown % 4 == 0
    assert more == f"{grown - 4} more t4 ({grown} devices)"
    # The first count is what the closest layout lacks: a smaller cluster holds too little.
    lacking = (
        error.ranking.closest[0].peak_bytes / error.ranking.problem.job.cluster.groups[0].device.usable_bytes
    )
    assert grown >= 4 * lacking
    # Half of the nodes would not do.
    nodes = (grown - 4) // 4
    assert nodes % 2 == 0
    half = changed_cluster(error.ranking.problem.job.cluster, f"+{nodes // 2} nodes t4")
    fewer = on_cluster(error.ranking.problem, half, tmp_path)
    assert not HomogeneousPlanner().search(fewer).fitting
    larger = found[next(change for change in found if change.endswith(" instead of t4"))]
    assert larger.problem.job.cluster.groups[0].device.memory_bytes > 16 * GIB
    assert larger.problem.job.cluster.ranks == 4


def test_a_job_that_is_far_too_large_learns_of_a_cluster_that_is_large_enough() -> None:
    """No count of nodes next to a power of two divides its layers, and no four devices hold its states."""
    _, found = remedies_of("gpt3-175b", "4xt4", precision="fp16", schedule="1f1b", micro_batch_size=1)
    assert [change.split()[1:] for change in found if " more t4 " in change]
    (larger,) = [one for change, one in found.items() if change.endswith(" instead of t4")]
    count, device, *_ = larger.change.split()
    assert int(count) == larger.problem.job.cluster.ranks > 4
    assert larger.problem.job.cluster.groups[0].device.name == device
    assert larger.best.verdict is Verdict.FITS


def test_methods_that_hold_less_are_named_with_their_keys() -> None:
    _, found = remedies_of("llama-7b", "4xt4", precision="fp16")
    (low_rank,) = [one for change, one in found.items() if change.startswith("[lora] rank = 16, which")]
    assert "lora" in [choice.name for choice in low_rank.problem.job.methods]
    (few_bits,) = [one for change, one in found.items() if 'base = "nf4"' in change]
    assert few_bits.best.peak_bytes < low_rank.best.peak_bytes


def test_a_model_without_attention_has_remedies_too() -> None:
    pins = {"micro_batch_size": 4096}
    asked = {"on": "1xv100-16gb", "global_batch": 4096, "sequence": None, "precision": "fp16", "pins": pins}
    run = run_of_keywords(model="resnet-18", **asked)
    with pytest.raises(NothingFitsError) as refused:
        plan_run(run)
    assert [one.change for one in remedies(run, refused.value)]


def test_pins_that_are_in_the_way_are_named() -> None:
    _, found = remedies_of("llama-1b", "8xt4", precision="fp16", pp=1, dp=8, sharding="zero-0")
    unpinned = found["other choices than pp 1, dp 8, sharding zero-0"]
    assert unpinned.best.chain.sharding != "zero-0" or unpinned.best.chain.dp < 8


def test_a_layout_that_is_not_legal_has_no_remedies() -> None:
    _, found = remedies_of("gpt2", "8xa100-80gb", precision="bf16", pp=1, dp=1, tp=2, cp=3)
    assert not found


def test_prices_are_told(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[node]]\nname = "ours"\ncount = 1\ndevice = "t4"\ndevices = 4\n[device.t4]\nprice_per_hour = 0.5\n'
    )
    _, found = remedies_of("llama-7b", str(cluster), precision="fp16", schedule="1f1b", micro_batch_size=1)
    low_rank = next(one for change, one in found.items() if change.startswith("[lora]"))
    price = 4 * 0.5 * low_rank.best.step_s / 3600 / (8 * 1024) * 1e6
    assert f", {price:.3g} per million tokens (" in low_rank.words
