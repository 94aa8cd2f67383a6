"""`weft show`: what the cluster's picture and the page hold, in text and in a real browser."""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from web.browser import Browser
from web.samples import HOSTILE

import weft
from weft.describe.cluster_file import parse_cluster
from weft.planning.planned import PlannedJob
from weft.web.cluster import MAXIMUM_NODES, cluster_svg, cluster_table, stages_by_rank
from weft.web.memory import memory_svg
from weft.web.show_page import show_page
from weft.web.stages import spans

SVG = "{http://www.w3.org/2000/svg}"


@cache
def planned() -> PlannedJob:
    """Two stages in two replicas, on some of twelve devices."""
    return weft.plan(
        model="gpt-1m", on="4xa100-80gb+8xt4", global_batch=8, precision="fp16", pp=2, dp=2, tp=1
    ).job


def devices_of(svg: str) -> dict[int, str]:
    """What is said of each drawn device."""
    titles = [one.text or "" for one in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    return {int(found[1]): found[2] for one in titles if (found := re.match(r"rank (\d+): (.*)", one))}


def test_every_device_is_drawn_with_its_stages_or_as_left_out() -> None:
    job = planned()
    cluster, held = job.problem.job.cluster, stages_by_rank(job.plan)
    assert set(held) == set(range(job.plan.ranks))
    drawn = devices_of(cluster_svg(cluster, job.plan, title=HOSTILE))
    assert set(drawn) == set(range(cluster.ranks))
    for rank, words in drawn.items():
        assert words == (
            f"stage{'s' * (len(held[rank]) > 1)} {spans(held[rank])}" if rank in held else "left out"
        )


def test_of_many_nodes_the_first_are_drawn() -> None:
    cluster = parse_cluster("256xa100-80gb")
    svg = cluster_svg(cluster, planned().plan, title="many")
    assert len(devices_of(svg)) == MAXIMUM_NODES * 8
    assert f"and {32 - MAXIMUM_NODES} more nodes" in svg


def test_terminals_get_a_line_for_each_group_and_each_link() -> None:
    job = planned()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(cluster_table(job.problem.job.cluster, job.plan))
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["group", "a100-80gb", "t4", "a100-80gb", "t4"]
    assert lines[2].rstrip().endswith("left out") == (job.plan.ranks == 4)
    assert "a100-80gb - t4" in lines[3]


@given(st.sets(st.integers(0, 60)))
def test_spans_say_every_number_once(numbers: set[int]) -> None:
    said: list[int] = []
    for part in filter(None, spans(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        said.extend(range(int(first), int(last or first) + 1))
    assert said == sorted(numbers)


def test_bars_of_memory_are_as_long_as_what_is_held_and_never_longer_than_the_device() -> None:
    svg = memory_svg([25, 25, 200], [100, 100, 100], title="memory")
    assert re.findall(r'width="([\d.]+)" height="18" fill', svg) == ["140.0", "560.0"]
    assert "ranks 0-1" in svg
    assert "(200%)" in svg


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_draws_it_and_loads_nothing_else(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "plan.html"
    path.write_text(show_page(planned()), encoding="utf-8")
    browser.open(path, width=width)
    assert browser.complaints() == []
    assert browser.requested() == [path.as_uri()]
    sections = browser.run("[...document.querySelectorAll('main > section')].map((one) => one.id)")
    assert sections == ["cluster", "stages", "memory", "breakdown", "timeline"]
    inside = "(r) => { const b = r.getBBox(), v = r.ownerSVGElement.viewBox.baseVal; return b.x >= 0 && "
    inside += "b.x + b.width <= v.width && b.y + b.height <= v.height; }"
    assert browser.run(f"[...document.querySelectorAll('svg rect')].every({inside})")
    assert browser.run(f"document.documentElement.scrollWidth <= {width}")
