"""Every page against axe's rules, in light and dark, narrow and wide; keyboard focus is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from web.axe import serious_violations
from web.browser import Browser
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
        reached = browser.run(REACHED)
        assert reached
        assert all(focused and outline >= 2 for focused, outline in reached)
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])


def _written(page: Callable[[], str], folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page(), encoding="utf-8")
    return path
