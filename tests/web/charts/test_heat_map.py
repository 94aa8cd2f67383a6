"""Cells in colours: every value has one, warm above the usual one and cool below."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from web.samples import HOSTILE

from weft.web.charts.heat_map import HeatMap, heat_map_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(values: list[list[float]]) -> list[tuple[str, str]]:
    """The colour and the words of each cell."""
    words = [[f"{value!r} {HOSTILE}" for value in row] for row in values]
    rows, columns = [HOSTILE] * len(values), [HOSTILE] * len(values[0])
    found = HeatMap(rows=rows, columns=columns, values=values, words=words, note=HOSTILE)
    tree = ElementTree.fromstring(heat_map_svg(found, title=HOSTILE))
    cells = [one for one in tree.iter(f"{SVG}g") if one.find(f"{SVG}title") is not None]
    return [(cell.find(f"{SVG}rect").get("fill"), cell.find(f"{SVG}title").text) for cell in cells]  # type: ignore[union-attr, misc]


@given(values=st.lists(st.floats(0.0, 3.0), min_size=2, max_size=40), rows=st.integers(1, 3))
def test_warmer_cells_have_larger_values(values: list[float], rows: int) -> None:
    cells = drawn([values] * rows)
    assert [words for _, words in cells] == [f"{value!r} {HOSTILE}" for value in values] * rows
    warmth = [int(colour[1:3], 16) - int(colour[5:7], 16) for colour, _ in cells]
    ordered = [warm for _, warm in sorted(zip(values * rows, warmth, strict=True))]
    assert ordered == sorted(ordered)
