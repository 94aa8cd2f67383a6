"""Scatter charts and the page that scores are shown on, in text and in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from web.browser import Browser
from web.samples import HOSTILE

from weft.web.charts import Axis
from weft.web.page import page_html, picture_section, table_section
from weft.web.scatter import Cloud, Dot, coloured, scatter_svg

SECONDS = Axis(label="seconds", logarithmic=True)


def chart(*clouds: Cloud, diagonal: bool = False) -> str:
    return scatter_svg(clouds, SECONDS, SECONDS, title=f"of {HOSTILE}", diagonal=diagonal)


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
    (cloud,) = coloured([("a", [Dot(x=1.0, y=2.0, words=HOSTILE)])])
    sections = [
        picture_section("scatter", "All", chart(cloud)),
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
