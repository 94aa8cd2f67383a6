"""One plan on a terminal: its cluster and its memory."""

from __future__ import annotations

import pytest
from cli.tables.printed import text_of
from web.plans import searched, two_stages

import weft
from weft.cli.tables.plan import cluster_table, idle_text, job_text, memory_bars, throughput_text
from weft.describe.units import format_count


def test_terminals_get_a_line_for_each_group_and_each_link() -> None:
    job = two_stages()
    lines = text_of(cluster_table(job.problem.job.cluster, job.plan), width=200).splitlines()
    assert [line.split()[0] for line in lines] == ["group", "a100-80gb", "t4", "a100-80gb", "t4"]
    assert lines[2].rstrip().endswith("left out") == (job.plan.ranks == 4)
    assert "a100-80gb - t4" in lines[3]


def test_idle_devices_are_named() -> None:
    job = two_stages()
    assert dict(job.idle) == {"t4": 8}
    assert idle_text(job) == "uses 4 of 12 devices; idle: 8 of t4 (ranks 4-11)"
    assert idle_text(searched()) == ""
    one = weft.plan(model="gpt-1m", on="2xt4", global_batch=8, pp=1, dp=1).job
    assert idle_text(one) == "uses 1 of 2 devices; idle: 1 of t4 (rank 1)"


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        ("gpt-1m", 1, "(1 device), 1 sample of 256 tokens, "),
        ("gpt-1m", 2, "(1 device), 2 samples of 256 tokens, "),
        ("vit-digits", 1, "(1 device), 1 image, "),
    ],
)
def test_single_things_of_a_job_are_singular(model: str, batch: int, words: str) -> None:
    assert words in job_text(weft.plan(model=model, on="1xt4", global_batch=batch).job.problem).plain


def test_throughput_is_told_of_all_devices_and_of_each() -> None:
    job = searched()
    seen, devices = job.throughput, job.plan.ranks
    text = throughput_text(job)
    assert seen.tokens_per_s is not None
    assert text.startswith(f"{format_count(seen.tokens_per_s)} tokens/s; per device")
    assert f"{format_count(seen.tokens_per_s / devices)} tokens/s and" in text
    assert f"FLOP/s, {seen.utilisation:.1%} MFU" in text


def test_memory_bars_join_equal_neighbours_and_show_overflow() -> None:
    gigabyte = 10**9
    text = text_of(
        memory_bars([10 * gigabyte] * 3 + [90 * gigabyte], [80 * gigabyte] * 4),
    )
    lines = text.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("ranks 0-2")
    assert "10.0 GB of 80.0 GB (12%)" in lines[0]
    assert "(112%)" in lines[1]
    assert "." not in lines[1].split("90.0")[0]
