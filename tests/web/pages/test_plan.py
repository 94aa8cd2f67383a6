"""The page of `weft show --report` in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from web.browser import Browser
from web.plans import branches, two_stages

from weft.web.pages.plan import show_page
from weft.web.rows.placed_layers import placed_layers


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
    names = ("stages", "stage-graph", "placed-layers", "memory")
    places = [page.find(f'<section id="{name}"') for name in names]
    assert 0 < places[0] < places[1] < places[2] < places[3]
    assert page.count("the slowest stage") == 1
    chain = show_page(two_stages())
    assert 'id="stage-graph"' not in chain
    assert 'id="placed-layers' not in chain


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_layers_of_a_placement_are_drawn_and_chosen_one_by_one(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(show_page(branches()), encoding="utf-8")
    browser.open(path, width=width)
    canvas, said = (
        "document.querySelector('#placed-layers canvas')",
        "document.querySelector('output').textContent",
    )
    assert browser.run(f"{canvas}.getBoundingClientRect().height") > 100
    assert browser.run(said).startswith("Point at a layer")
    names = []
    for key in ("ArrowRight", "ArrowRight", "+", "+", "ArrowDown", "-", "ArrowUp", "0"):
        browser.run(f"{canvas}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        names.append(browser.run(said).split(",")[0])
    placed = placed_layers(branches())
    lanes = [int(placed.lane[placed.names.index(name)]) for name in names]
    assert lanes == [0, 0, 0, 0, 1, 1, 0, 0]
    first = min(np.flatnonzero(placed.lane == 0), key=placed.start_s.__getitem__)
    assert names[0] == placed.names[first]
    # The whole picture has pixels of the colours of the legend.
    pixels = f"{canvas}.getContext('2d').getImageData(0, 0, {canvas}.width, {canvas}.height).data.buffer"
    assert browser.run(f"new Set([...new Uint32Array({pixels})]).size") > 4
    assert browser.complaints() == []
    assert browser.run(f"document.documentElement.scrollWidth <= {width}")
