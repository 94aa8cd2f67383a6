"""Bars from a common zero, with their names and numbers."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from web.samples import HOSTILE

from weft.web.charts.bars import Bar, bars_svg

SVG = "{http://www.w3.org/2000/svg}"


@given(values=st.lists(st.floats(0.0, 1e12), min_size=1, max_size=5))
def test_lengths_are_in_the_proportion_of_the_values(values: list[float]) -> None:
    svg = bars_svg([Bar(name=HOSTILE, value=value, text="x") for value in values], title=HOSTILE)
    found = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}rect") if one.get("fill")]
    lengths = [float(one.get("width", "nan")) for one in found]
    assert len(lengths) == len(values)
    ordered = sorted(zip(values, lengths, strict=True))
    assert all(short <= long for (_, short), (_, long) in pairwise(ordered))
    assert ordered[-1][1] == max(lengths)
