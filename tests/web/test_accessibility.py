"""Every page against axe's rules, in light and dark, narrow and wide; keyboard focus is seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from web.browser import Browser
from web.every_page import PAGES

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("own_home")]

SERIOUS = ("serious", "critical")
AUDIT = """axe.run({resultTypes: ["violations"]}).then((result) => result.violations.map(
  (one) => [one.impact, one.id, one.nodes.map((node) => node.target.join(" ")).slice(0, 3).join(", ")]))"""
# What Tab reaches, in order, each with the width of its outline.
REACHED = """(() => {
  const stops = [...document.querySelectorAll("a[href], button, select, [tabindex='0']")];
  return stops.filter((one) => one.checkVisibility()).map((one) => {
    one.focus({focusVisible: true});
    return [one === document.activeElement, parseFloat(getComputedStyle(one).outlineWidth)];
  });
})()"""


@cache
def axe() -> str:
    pytest.importorskip("axe_core_python", reason="axe is missing: pip install axe-core-python")
    return files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_no_page_violates_a_serious_rule_and_focus_is_seen(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    rules, page = axe(), _written(PAGES[name], tmp_path)
    try:
        for scheme in ("light", "dark"):
            chosen = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=chosen)
            for width in (390, 1280):
                browser.open(page, width=width)
                browser.run(rules)
                found = [one for one in browser.run(AUDIT) if one[0] in SERIOUS]
                assert found == [], f"{scheme}, {width} pixels"
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
