from __future__ import annotations

import dataclasses
import io
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from web.samples import HOSTILE

from weft.predict.abstract import simulate_schedule
from weft.timeline.timeline import TIMELINE_COLUMNS, Timeline
from weft.web.memory import memory_bars
from weft.web.pictures import plans_table, timeline_picture
from weft.web.scale import time_ticks
from weft.web.svg import timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def timeline(devices: int = 4, loops: int = 2, micro_batches: int = 8) -> Timeline:
    return simulate_schedule(
        "breadth-first", devices=devices, loops=loops, micro_batches=micro_batches
    ).timeline


def text_of(renderable: RenderableType, width: int = 80, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(max_examples=25, deadline=None)
@given(
    devices=st.integers(1, 6), loops=st.integers(1, 3), batches=st.integers(1, 12), width=st.integers(40, 200)
)
def test_plain_pictures_are_ascii_and_fit(devices: int, loops: int, batches: int, width: int) -> None:
    lines = text_of(timeline_picture(timeline(devices, loops, batches)), width).splitlines()
    assert all(line.isascii() and len(line.rstrip()) <= width for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == devices


def test_plain_picture_is_exact() -> None:
    picture = timeline_picture(timeline(devices=2, loops=1, micro_batches=2))
    lines = [line.rstrip() for line in text_of(picture, width=45).splitlines()]
    assert lines[:4] == [
        "rank 0 0---1---            0-------1-------",
        "       FFFFFFFF            BBBBBBBBBBBBBBBB",
        "rank 1     0---1---0-------1-------",
        "           FFFFFFFFBBBBBBBBBBBBBBBB",
    ]
    assert lines[-1] == "F forward  B backward"


def test_coloured_picture_shows_the_same_blocks_as_colours() -> None:
    plain = text_of(timeline_picture(timeline()), 120)
    coloured = text_of(timeline_picture(timeline()), 120, colour=True)
    assert "\x1b[" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    first = next(line for line in bare.splitlines() if line.startswith("rank 0"))
    assert re.findall(r"\d+", first)[1:] == re.findall(r"\d+", plain.splitlines()[0])[1:]


def test_many_ranks_are_cut_and_said() -> None:
    assert "and 8 more ranks" in text_of(timeline_picture(timeline(40, 1, 2)))


def test_a_timeline_without_computation_says_so() -> None:
    one = timeline(1, 1, 1)
    nothing = dataclasses.replace(one, **{name: getattr(one, name)[:0] for name in TIMELINE_COLUMNS})
    assert text_of(timeline_picture(nothing)).strip() == "nothing was computed"
    ElementTree.fromstring(timeline_svg(nothing, title="nothing"))


@settings(max_examples=15, deadline=None)
@given(
    devices=st.integers(1, 5), loops=st.integers(1, 3), batches=st.integers(1, 10), title=st.text(max_size=30)
)
def test_svg_is_well_formed_and_draws_every_computation(
    devices: int, loops: int, batches: int, title: str
) -> None:
    one = timeline(devices, loops, batches)
    title = "".join(letter for letter in title if letter.isprintable())
    root = ElementTree.fromstring(timeline_svg(one, title=title))
    assert root.findtext(f"{SVG}title") == title
    blocks = [
        node for node in root.iter(f"{SVG}rect") if node.get("class") is None and node.get("rx") is None
    ]
    assert len(blocks) == 2 * devices * loops * batches
    assert sum(node.get("class") == "weft-lane" for node in root.iter(f"{SVG}rect")) == devices


def test_svg_escapes_its_title_and_is_small() -> None:
    text = timeline_svg(timeline(), title=HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert len(text) < 25_000
    assert "ranks 0 to 63 of 70" in timeline_svg(timeline(70, 1, 2), title="wide")


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


@given(st.integers(1, 10**13), st.integers(2, 12))
def test_ticks_are_round_few_and_inside(span_ns: int, most: int) -> None:
    ticks = time_ticks(span_ns, most)
    assert 1 <= len(ticks) <= most
    places = [at for at, _ in ticks]
    assert places[0] == 0
    assert places[-1] <= span_ns
    assert len(set(places)) == len(places)
    assert len({label for _, label in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("span_ns", "last"), [(473_000_000, "400 ms"), (28_500_000_000, "20 s"), (7, "6 ns")]
)
def test_ticks_of_known_spans(span_ns: int, last: str) -> None:
    assert time_ticks(span_ns, 5)[-1][1] == last
