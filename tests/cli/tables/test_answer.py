"""The answer of `weft plan`: one screen, with the figures of the plan that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cli.tables.printed import text_of

import weft
from weft.cli.tables.answer import ALTERNATIVES, answer, plain_words
from weft.describe.units import format_bytes, format_seconds
from weft.planning.alternatives import alternatives
from weft.planning.planned_job import PlannedJob

# The lines of a terminal of usual height, less the prompts before and after.
SCREEN = 30


def planned(on: str, **keys: object) -> PlannedJob:
    return weft.plan(model="gpt-10m", on=on, global_batch=64, **keys).job


def lines_of(job: PlannedJob, source: str = "gpt-10m", width: int = 80) -> list[str]:
    assert job.ranking is not None
    others = alternatives(job.ranking, ALTERNATIVES)
    return [line.rstrip() for line in text_of(answer(job, others, None, source), width).splitlines()]


@pytest.mark.parametrize("on", ["8xa100-80gb", "8xa100-80gb+8xt4", "64xh100-80gb", "1xl4"])
def test_the_answer_fits_a_screen(on: str) -> None:
    lines = lines_of(planned(on))
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 80


def test_the_answer_has_the_figures_of_the_best_plan() -> None:
    job = planned("8xa100-80gb")
    text = " ".join(" ".join(lines_of(job, width=200)).split())
    assert job.ranking is not None
    assert f"best {plain_words(job)}" in text
    assert f"layout {job.ranking.fitting[0].words}" in text
    assert f"step {format_seconds(job.prediction.step_s)}, 90 % interval {job.prediction.interval}" in text
    assert f"{job.throughput.utilisation:.1%} MFU" in text
    assert format_bytes(max(job.prediction.peak_bytes)) in text
    for one in alternatives(job.ranking, ALTERNATIVES):
        assert one.changed in text
        assert format_seconds(one.candidate.step_s) in text
    for words in job.problem.assumed.values():
        assert words in text
    assert "cost" not in text


def test_idle_devices_and_prices_have_rows(tmp_path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[node]]\nname = "ours"\ncount = 1\ndevice = "a100-80gb"\ndevices = 6\n'
        "[device.a100-80gb]\nprice_per_hour = 2.0\n"
    )
    job = planned(str(cluster), pp=1, dp=4)
    text = "\n".join(lines_of(job))
    assert "idle" in text
    assert "idle: 2 of ours" in text
    tokens = 64 * job.problem.job.sequence
    # A node that is used in part is paid for as a whole.
    price = 6 * 2.0 * job.prediction.step_s / 3600 / tokens * 1e6
    assert f"{price:.3g} per million tokens" in text
    assert "of the nodes in use alone" not in text
    cluster.write_text(cluster.read_text().replace("count = 1", "count = 2"))
    job = planned(str(cluster), pp=1, dp=4)
    price = 6 * 2.0 * job.prediction.step_s / 3600 / tokens * 1e6
    assert f"{price:.3g} per million tokens, of the nodes in use alone" in " ".join(lines_of(job, width=200))


def test_the_memory_of_unlike_devices_is_that_of_the_fullest_and_of_the_largest_rank(tmp_path) -> None:
    kinds = (("large", "80 GB", 80), ("small", "1 GB", 20))
    (tmp_path / "cluster.toml").write_text(
        "".join(
            f'[[node]]\nname = "{name}"\ndevice = "{name}"\ndevices = 1\n'
            'bandwidth = "1 GB/s"\nlatency = "50 us"\n'
            f'[device.{name}]\nmemory = "{memory}"\nmemory_bandwidth = "10 GB/s"\n'
            f'flops = {{ fp32 = "{speed} GFLOP/s" }}\nlaunch = "5 us"\nsynchronous = true\n'
            for name, memory, speed in kinds
        )
        + '[[link]]\nbetween = ["large", "small"]\nbandwidth = "1 GB/s"\nlatency = "50 us"\n'
    )
    job = planned(str(tmp_path / "cluster.toml"), pp=2)
    peaks = dict(zip(job.memory_bytes, job.prediction.peak_bytes, strict=True))
    assert peaks[10**9] < peaks[80 * 10**9] < 80 * peaks[10**9]
    text = " ".join(" ".join(lines_of(job, width=200)).split())
    assert f"rank 1: {format_bytes(peaks[10**9])} of 1.00 GB" in text
    assert f"rank 0: {format_bytes(peaks[80 * 10**9])} of 80.0 GB" in text
    job = planned("8xa100-80gb+8xt4", pp=1, dp=8)
    assert "of a100-80gb stay in reserve" in " ".join(lines_of(job, width=200))


def test_a_run_file_of_this_machine_is_trained_next() -> None:
    here = planned("this-machine")
    assert "next     weft train run.toml; --out" in "\n".join(lines_of(here, "run.toml"))
    for job, source in ((here, "gpt-10m"), (planned("1xl4"), "run.toml")):
        assert "next     --out plan.json" in "\n".join(lines_of(job, source))


def test_a_utilisation_that_nobody_has_reached_is_marked() -> None:
    job = planned("8xa100-80gb")
    assert "measure before" not in " ".join(lines_of(job))
    prediction = job.prediction.model_copy(update={"step_s": job.prediction.step_s / 100})
    text = " ".join(" ".join(lines_of(replace(job, chosen_for=prediction), width=200)).split())
    assert "above 72%, the highest published utilisation" in text


def test_images_are_counted_as_images(tmp_path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[node]]\nname = "t4"\ncount = 1\ndevice = "t4"\ndevices = 2\n[device.t4]\nprice_per_hour = 0.5\n'
    )
    job = weft.plan(model="vit-tiny", on=str(cluster), global_batch=64).job
    text = "\n".join(lines_of(job, "vit-tiny"))
    assert "64 images, " in text
    assert " images/s" in text
    price = 2 * 0.5 * job.prediction.step_s / 3600 / 64 * 1e6
    assert f"{price:.3g} per million images" in text
