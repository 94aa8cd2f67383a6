"""Charts, tables and figures of the curve."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from weft.planning.curve import Curve, curve
from weft.planning.problem import problem_of
from weft.web.charts import Axis, Chart, Line, charts_svg
from weft.web.curve import (
    curve_record,
    curve_svg,
    layouts_table,
    share_text,
    trade_off_table,
    utilisation_table,
)

SVG = "{http://www.w3.org/2000/svg}"
DEVICES = (4, 64, 4096)


@pytest.fixture(scope="module")
def small() -> Curve:
    return curve(problem_of(model="gpt-1m", on="4xv100-32gb", precision="fp16"), samples_per_device=(0.25, 2))


def text_of(renderable: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_shares_are_fractions() -> None:
    assert [share_text(share) for share in (0.125, 0.5, 1, 2.0)] == ["1/8", "1/2", "1", "2"]


def test_tables_fit_80_columns_and_mark_what_does_not_fit(small: Curve) -> None:
    utilisation = text_of(utilisation_table(small))
    assert utilisation[0].split() == ["method", "1/4", "2"]
    assert utilisation[2].split()[:2] == ["depth-first", "-"]
    assert len(utilisation) == 1 + len(small.methods)
    layouts = " ".join(text_of(layouts_table(small)))
    assert "nearest: 2 micro-batches" in " ".join(layouts.split())
    costs = text_of(trade_off_table(small, DEVICES, 512))
    assert costs[0].split() == ["devices", "4", "64", "4096"]
    assert costs[-1].startswith("least time")
    assert all(line.count(" at ") == 3 for line in costs[1:-1])


def test_the_record_has_a_row_for_every_point_and_cluster_size(small: Curve) -> None:
    record = curve_record(small, DEVICES, 512)
    assert len(record["points"]) == len(small.points)
    first, missing = record["points"][0], record["points"][2]
    assert first["method"] == "breadth-first"
    assert 0 < first["utilisation"] < 1
    assert first["plan_id"]
    assert missing["method"] == "depth-first"
    assert missing["utilisation"] is None
    rows = record["trade_off"]
    assert len(rows) == len(small.methods) * len(DEVICES)
    assert all(row["time"] == pytest.approx(row["cost"] * 4 / row["devices"]) for row in rows)


def test_the_picture_has_two_charts_and_a_line_for_every_method(small: Curve) -> None:
    root = ElementTree.fromstring(curve_svg(small, DEVICES, 512))
    words = [element.text for element in root.iter(f"{SVG}text")]
    for method in small.methods:
        assert words.count(method.name) == 1
    assert {"1/4", "2", "4", "Best layout of each method"} <= set(words)
    lines = [element for element in root.iter(f"{SVG}path") if element.get("fill") == "none"]
    # Two charts and the legend.
    assert len(lines) == 3 * len(small.methods)
    dashed = [element.get("stroke") for element in lines if element.get("stroke-dasharray")]
    plain = [element.get("stroke") for element in lines if not element.get("stroke-dasharray")]
    assert len(dashed) == 6
    assert set(dashed) <= set(plain)


@settings(max_examples=50, deadline=None)
@given(
    points=st.lists(
        st.tuples(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9)), min_size=1, max_size=8, unique=True
    ),
    logarithmic=st.booleans(),
)
def test_every_point_lies_inside_its_chart(points: list[tuple[float, float]], logarithmic: bool) -> None:
    line = Line(name="<a & b>", colour="#000000", points=tuple(points), marks=((0, "first"),))
    axis = Axis(label="x", logarithmic=logarithmic)
    root = ElementTree.fromstring(
        charts_svg([Chart(title="t", across=axis, up=axis, lines=(line,))] * 2, title="two")
    )
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == 2 * len(points)
    for place, circle in enumerate(circles):
        left = 0 if place < len(points) else 480
        assert left + 62 <= float(circle.get("cx", "nan")) <= left + 480 - 16
        assert 66 <= float(circle.get("cy", "nan")) <= 400 - 46


def test_larger_values_lie_to_the_right_and_higher() -> None:
    line = Line(name="a", colour="#000000", points=((1, 1), (10, 10), (100, 100)))
    axis = Axis(label="x", logarithmic=True)
    root = ElementTree.fromstring(
        charts_svg([Chart(title="t", across=axis, up=axis, lines=(line,))], title="t")
    )
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] > places[1][1] > places[2][1]


def test_a_chart_without_points_says_so() -> None:
    chart = Chart(title="t", across=Axis(label="x"), up=Axis(label="y"), lines=())
    assert "nothing fits" in charts_svg([chart], title="t")
