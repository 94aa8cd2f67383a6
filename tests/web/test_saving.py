"""Pictures saved from pages: complete SVG files that need no style sheet."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from web.browser import Browser
from web.every_page import PAGES

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("own_home")]

SVG = "{http://www.w3.org/2000/svg}"
# Keeps what the buttons would download.
KEEP = """window.texts = []; window.names = [];
URL.createObjectURL = (blob) => { texts.push(blob.text()); return "data:,"; };
HTMLAnchorElement.prototype.click = function () { names.push(this.download); };"""
PICTURES = """[...document.querySelectorAll("section")]
  .filter((one) => one.querySelector("svg:not(table svg)"))
  .map((one) => [one.id, one.querySelectorAll("button.save").length])"""


@pytest.mark.parametrize("name", PAGES)
def test_every_picture_is_saved_whole(name: str, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    browser.open(path, width=1280)
    browser.run(KEEP)
    pictures = browser.run(PICTURES)
    assert pictures
    assert all(buttons == 1 for _, buttons in pictures)
    for section, _ in pictures:
        browser.run(f"document.getElementById('{section}-save').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13
            )
    assert browser.complaints() == []
    names = browser.run("names")
    assert [one.rsplit(f"-{section}", 1)[1] for one, (section, _) in zip(names, pictures, strict=True)] == [
        ".svg"
    ] * len(pictures)
    for (section, _), text in zip(pictures, browser.run("Promise.all(texts)"), strict=True):
        root = ElementTree.fromstring(text)
        heading = browser.run(f"document.querySelector('#{section} h2').textContent")
        assert root.findtext(f"{SVG}title") == heading
        assert not [node.tag for node in root.iter() if node.get("class") or node.tag == f"{SVG}style"]
        assert "var(" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        drawn = browser.run(f"document.querySelectorAll('#{section} svg:not(table svg) text').length")
        words = list(root.iter(f"{SVG}text"))
        assert len(words) > drawn
        assert all(node.get("fill") and node.get("font-size") for node in words)
