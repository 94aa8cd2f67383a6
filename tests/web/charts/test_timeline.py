"""Timelines as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from web.samples import HOSTILE, breadth_first, replicated, without_rows

from weft.predict.abstract import simulate_schedule
from weft.program.kinds import all_kinds
from weft.web.charts.picture import WIDTH, kind_colour
from weft.web.charts.timeline import MAXIMUM_BLOCKS, MAXIMUM_ROWS, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=15)
@given(
    devices=st.integers(1, 5), loops=st.integers(1, 3), batches=st.integers(1, 10), title=st.text(max_size=30)
)
def test_svg_is_well_formed_and_draws_every_computation(
    devices: int, loops: int, batches: int, title: str
) -> None:
    one = breadth_first(devices, loops, batches)
    title = "".join(letter for letter in title if letter.isprintable())
    root = ElementTree.fromstring(timeline_svg(one, title=title))
    assert root.findtext(f"{SVG}title") == title
    blocks = "".join(node.get("d", "") for node in root.iter(f"{SVG}path") if node.get("class") is None)
    assert blocks.count("z") == 2 * devices * loops * batches
    assert sum(node.get("class") == "weft-lane" for node in root.iter(f"{SVG}rect")) == devices


def test_svg_escapes_its_title_and_is_small() -> None:
    text = timeline_svg(breadth_first(), title=HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert len(text) < 25_000


def test_equal_ranks_share_a_row_and_are_counted() -> None:
    one = breadth_first(4, 2, 4)
    text = timeline_svg(replicated(one, 3), title="t")
    root = ElementTree.fromstring(text)
    assert sum(node.get("class") == "weft-lane" for node in root.iter(f"{SVG}rect")) == 4
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert {f"ranks {rank}, {rank + 4}, {rank + 8} (3)" for rank in range(4)} <= set(words)
    assert "of equal ranks, the micro-batches of the first one; darker: later stages of a rank" in words
    blocks = "".join(node.get("d", "") for node in root.iter(f"{SVG}path") if node.get("class") is None)
    assert blocks.count("z") == 2 * 4 * 2 * 4


@pytest.mark.parametrize("schedule", ["breadth-first", "1f1b"])
def test_of_too_many_blocks_the_first_ranks_are_drawn(schedule: str) -> None:
    wide = simulate_schedule(schedule, devices=70, loops=1, micro_batches=128).timeline
    text = timeline_svg(wide, title="wide")
    found = re.search("the first ([0-9]+) of 70 rows of different ranks", text)
    assert found
    assert 1 <= int(found[1]) <= MAXIMUM_ROWS
    assert text.count("z") <= MAXIMUM_BLOCKS
    assert len(text) < 200_000


def test_no_text_of_the_axis_leaves_the_picture() -> None:
    for batches in range(1, 40):
        root = ElementTree.fromstring(timeline_svg(breadth_first(2, 1, batches), title="t"))
        for node in root.iter(f"{SVG}text"):
            centred = "weft-middle" in node.get("class", "")
            assert float(node.get("x", "")) + centred * 3.3 * len(node.text or "") <= WIDTH


def test_a_timeline_without_computation_is_an_empty_picture() -> None:
    ElementTree.fromstring(timeline_svg(without_rows(breadth_first(1, 1, 1)), title="nothing"))


def contrast(colour: str) -> float:
    """The contrast of white on a colour, as accessibility guidelines define it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


@pytest.mark.parametrize("kind", [kind.name for kind in all_kinds() if kind.stream == "compute"])
def test_white_words_are_read_on_all_blocks_that_have_them(kind: str) -> None:
    assert contrast(kind_colour(kind)) >= 4.5
