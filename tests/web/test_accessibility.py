"""Every page against axe's rules, in light and dark, narrow and wide; contrast in pictures; focus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from web.axe import serious_violations
from web.browser import Browser
from web.contrast import faint_texts
from web.every_page import PAGES

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("own_home")]

# What Tab reaches, in order, each with the width of its outline.
REACHED = """(() => {
  const stops = [...document.querySelectorAll("a[href], button, select, [tabindex='0']")];
  return stops.filter((one) => one.checkVisibility()).map((one) => {
    one.focus({focusVisible: true});
    return [one === document.activeElement, parseFloat(getComputedStyle(one).outlineWidth)];
  });
})()"""


@pytest.mark.parametrize("name", PAGES)
def test_no_page_violates_a_serious_rule_and_focus_is_seen(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    page = _written(PAGES[name], tmp_path)
    try:
        for scheme in ("light", "dark"):
            chosen = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=chosen)
            for width in (390, 1280):
                browser.open(page, width=width)
                assert serious_violations(browser) == [], f"{scheme}, {width} pixels"
                assert browser.run("document.documentElement.scrollWidth") <= width
                assert faint_texts(browser) == [], f"{scheme}, {width} pixels"
        reached = browser.run(REACHED)
        assert reached
        assert all(focused and outline >= 2 for focused, outline in reached)
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize(
    ("picture", "faint"),
    [
        ('<rect width="90" height="40" fill="#fff"/><text x="9" y="20" fill="#767676">words</text>', False),
        ('<rect width="90" height="40" fill="#fff"/><text x="9" y="20" fill="#787878">words</text>', True),
        ('<text x="9" y="30" font-size="24" fill="#8c8c8c">words</text>', False),
        ('<text x="9" y="20" fill="#000" opacity="0.4">words</text>', True),
        ('<rect width="90" height="40" fill="#000" opacity="0.5"/><text x="9" y="20">words</text>', False),
        ('<rect width="90" height="40" fill="#000" opacity="0.7"/><text x="9" y="20">words</text>', True),
        ('<text x="9" y="20">first<tspan fill="#ddd">second</tspan></text>', True),
        ('<path d="M0 16H90" stroke="#000" stroke-width="9"/><text x="9" y="20">words</text>', True),
        (
            '<path d="M0 16H90" stroke="#000" stroke-width="9"/>'
            '<text x="9" y="20" stroke="#fff" stroke-width="4" paint-order="stroke">words</text>',
            False,
        ),
    ],
)
def test_text_in_pictures_is_judged_against_what_lies_behind_it(
    picture: str, faint: bool, browser: Browser, tmp_path: Path
) -> None:
    page = _written(lambda: f"<!doctype html><svg width='90' height='40'>{picture}</svg>", tmp_path)
    browser.open(page)
    assert bool(faint_texts(browser)) is faint


def _written(page: Callable[[], str], folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page(), encoding="utf-8")
    return path
