"""Timelines as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st
from web.samples import HOSTILE, breadth_first, without_rows

from weft.web.charts.timeline import timeline_svg

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
    blocks = [
        node for node in root.iter(f"{SVG}rect") if node.get("class") is None and node.get("rx") is None
    ]
    assert len(blocks) == 2 * devices * loops * batches
    assert sum(node.get("class") == "weft-lane" for node in root.iter(f"{SVG}rect")) == devices


def test_svg_escapes_its_title_and_is_small() -> None:
    text = timeline_svg(breadth_first(), title=HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert len(text) < 25_000
    assert "ranks 0 to 63 of 70" in timeline_svg(breadth_first(70, 1, 2), title="wide")


def test_a_timeline_without_computation_is_an_empty_picture() -> None:
    ElementTree.fromstring(timeline_svg(without_rows(breadth_first(1, 1, 1)), title="nothing"))
