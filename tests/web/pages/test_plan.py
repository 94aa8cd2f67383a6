"""The page of `weft show --report` in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from web.browser import Browser
from web.plans import branches, two_stages

from weft.web.pages.plan import show_page


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_draws_it_and_loads_nothing_else(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "plan.html"
    path.write_text(show_page(two_stages()), encoding="utf-8")
    browser.open(path, width=width)
    assert browser.complaints() == []
    assert browser.requested() == [path.as_uri()]
    sections = browser.run("[...document.querySelectorAll('main > section')].map((one) => one.id)")
    assert sections == ["cluster", "stages", "memory", "breakdown", "timeline"]
    inside = "(r) => { const b = r.getBBox(), v = r.ownerSVGElement.viewBox.baseVal; "
    inside += (
        "return b.x >= 0 && b.y >= v.y && b.x + b.width <= v.width && b.y + b.height <= v.y + v.height; }"
    )
    assert browser.run(f"[...document.querySelectorAll('svg rect')].every({inside})")
    assert browser.run(f"document.documentElement.scrollWidth <= {width}")


def test_a_graph_of_stages_is_drawn_behind_their_table() -> None:
    page = show_page(branches())
    places = [page.find(f'<section id="{name}"') for name in ("stages", "stage-graph", "memory")]
    assert 0 < places[0] < places[1] < places[2]
    assert page.count("the slowest stage") == 1
    assert 'id="stage-graph"' not in show_page(two_stages())
