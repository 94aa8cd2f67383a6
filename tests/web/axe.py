"""The rules of accessibility of axe, run on the page that a browser shows."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import pytest
from web.browser import Browser

SERIOUS = ("serious", "critical")
AUDIT = """axe.run({resultTypes: ["violations"]}).then((result) => result.violations.map(
  (one) => [one.impact, one.id, one.nodes.map((node) => node.target.join(" ")).slice(0, 3).join(", ")]))"""


@cache
def _rules() -> str:
    pytest.importorskip("axe_core_python", reason="axe is missing: pip install axe-core-python")
    return files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def serious_violations(browser: Browser) -> list[list[str]]:
    """The violated rules: impact, name and some of the elements."""
    browser.run(_rules())
    return [one for one in browser.run(AUDIT) if one[0] in SERIOUS]
