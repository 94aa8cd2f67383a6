"""Charts of dots and of lines, and the page that scores are shown on, in text and in a real browser."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web.browser import Browser
from web.samples import HOSTILE

from weft.web.charts.axes import Axis
from weft.web.charts.chart import Chart, Cloud, Dot, Line, coloured, dots_svg, lines_svg
from weft.web.pages.page import page_html, picture_section, table_section

SVG = "{http://www.w3.org/2000/svg}"
SECONDS = Axis(label="seconds", logarithmic=True)


def chart(*clouds: Cloud, diagonal: bool = False) -> str:
    drawn = Chart(across=SECONDS, up=SECONDS, drawn=clouds, diagonal=diagonal)
    return dots_svg(drawn, title=f"of {HOSTILE}")


def test_every_dot_is_drawn_with_its_words_and_every_cloud_named():
    dots = [Dot(x=1.0 + place, y=2.0, words=f"dot {place} {HOSTILE}") for place in range(5)]
    svg = chart(*coloured([("a", dots[:3]), ("b", dots[3:])]))
    assert svg.count("<circle") == 5 + 2
    assert len(re.findall(r"<title>dot \d", svg)) == 5
    assert HOSTILE not in svg


def test_higher_values_are_higher_and_rings_are_not_filled():
    low, high = Dot(x=1.0, y=1.0, words="low"), Dot(x=1.0, y=10.0, words="high", filled=False)
    (cloud,) = coloured([("a", (low, high))])
    places = [float(y) for y in re.findall(r'cy="([\d.]+)" r="3.6" fill', chart(cloud))]
    assert places[1] < places[0]
    assert chart(cloud).count('fill="none"') == 1


def test_intervals_and_the_diagonal_widen_both_axes():
    dot = Dot(x=1.0, y=2.0, words="one", interval=(1.5, 200.0))
    (cloud,) = coloured([("a", (dot,))])
    svg = chart(cloud, diagonal=True)
    assert "stroke-dasharray" in svg
    assert ">100<" in svg


def test_a_chart_without_dots_says_so():
    assert "nothing to show" in chart()


@pytest.mark.browser
def test_the_page_is_clean_and_its_tables_are_read(browser: Browser, tmp_path: Path):
    drawn = Chart(across=SECONDS, up=SECONDS, drawn=coloured([("a", [Dot(x=1.0, y=2.0, words=HOSTILE)])]))
    sections = [
        picture_section("scatter", "All", partial(dots_svg, drawn)),
        table_section("figures", "Figures", ("group", "rows"), [(HOSTILE, "3")]),
    ]
    path = tmp_path / "page.html"
    path.write_text(page_html(HOSTILE, "sub", sections))
    browser.open(path, width=1200)
    assert browser.complaints() == []
    assert browser.run("document.querySelector('td').textContent") == "3"
    assert browser.run("document.querySelector('th[scope=row]').textContent") == HOSTILE
    assert browser.run("document.querySelector('svg g title').textContent") == HOSTILE
    # The chart is styled although the page admits no styles but its own.
    assert browser.run("getComputedStyle(document.querySelector('.weft-middle')).textAnchor") == "middle"


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
        lines_svg([Chart(title="t", across=axis, up=axis, drawn=[line])] * 2, title="two")
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
        lines_svg([Chart(title="t", across=axis, up=axis, drawn=[line])], title="t")
    )
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] > places[1][1] > places[2][1]


def test_a_chart_without_points_says_so() -> None:
    chart = Chart(title="t", across=Axis(label="x"), up=Axis(label="y"), drawn=())
    assert "nothing fits" in lines_svg([chart], title="t")
