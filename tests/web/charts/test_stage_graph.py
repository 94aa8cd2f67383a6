"""The picture of a stage graph: every stage and edge once, boxes apart from each other and in the picture."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from web.samples import HOSTILE

from weft.web.charts.picture import WIDTH
from weft.web.charts.stage_graph import stage_graph_svg
from weft.web.rows.stage_graph import StageDiagram, StageNode

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def stage_graphs(draw: st.DrawFn) -> StageDiagram:
    count = draw(st.integers(1, 12))
    pairs = [(one, other) for other in range(count) for one in range(other)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    nodes = tuple(
        StageNode((f"stage {index}", "layers of it", f"rank {index}"), (f"why {index}",), 1.0, 0.5)
        for index in range(count)
    )
    return StageDiagram(nodes, tuple(sorted(edges)))


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of the stages."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        assert box is not None
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    return found


@given(stage_graphs())
def test_stages_do_not_overlap_and_edges_lead_to_the_right(graph: StageDiagram) -> None:
    svg = stage_graph_svg(graph, title="a graph")
    root, drawn = ElementTree.fromstring(svg), boxes(svg)
    assert len(drawn) == len(graph.nodes)
    height = float(root.attrib["height"])
    assert all(0 <= left < right <= WIDTH and 0 <= top < low <= height for left, top, right, low in drawn)
    for one, other in combinations(drawn, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    paths = re.findall(r'd="M([\d.]+) [\d.]+C.* ([\d.]+) [\d.]+"', svg.replace("/>", "/>\n"))
    assert len(paths) == len(graph.edges)
    assert all(float(start) < float(end) for start, end in paths)


def test_words_stay_text_and_the_slowest_stage_is_the_darkest() -> None:
    nodes = (
        StageNode((HOSTILE, HOSTILE, HOSTILE), (HOSTILE,), 0.5, 2.0),
        StageNode(("stage 1", "head", "rank 1"), ("why",), 1.0, 0.1),
    )
    svg = stage_graph_svg(StageDiagram(nodes, ()), title=HOSTILE)
    first, second = ElementTree.fromstring(svg).iter(f"{SVG}g")
    assert HOSTILE in (first.findtext(f"{SVG}title") or "")
    fills = [int(group.findall(f"{SVG}rect")[0].attrib["fill"][1:], 16) for group in (first, second)]
    assert fills[1] < fills[0]


def test_deep_graphs_have_room() -> None:
    nodes = tuple(StageNode((f"stage {one}", "layers", "rank"), (), 1.0, 0.5) for one in range(64))
    edges = [(one, one + 1) for one in range(63)]
    drawn = boxes(stage_graph_svg(StageDiagram(nodes, (*edges, (0, 63))), title="deep"))
    assert max(right for _, _, right, _ in drawn) <= WIDTH
