"""The site has a place for every page, its sections list theirs, and its search needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installing import ROOT
from web.browser import Browser

import weft
from docs import make_pictures
from docs.notebook_pages import NOTEBOOKS

mkdocs_config = pytest.importorskip("mkdocs.config", reason="the documentation tools are not installed")
mkdocs_build = pytest.importorskip("mkdocs.commands.build")

DOCS = ROOT / "docs"
# Made of other files when the site is built.
ELSEWHERE = {"contributing.md"} | {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}


def pages(entries: Any) -> Iterator[str]:
    """The paths of a part of the navigation, in its order."""
    for entry in [entries] if isinstance(entries, str) else entries:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from pages(below)


@pytest.fixture(scope="module")
def sections() -> dict[str, list[str]]:
    nav = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), hooks=[]).nav
    return {name: [*pages(below)] for section in nav for name, below in section.items()}


def test_every_page_has_one_place(sections: dict[str, list[str]]) -> None:
    placed = [page for section in sections.values() for page in section]
    assert len(placed) == len(set(placed))
    assert set(placed) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | ELSEWHERE


def test_a_section_begins_with_a_list_of_its_pages(sections: dict[str, list[str]]) -> None:
    for first, *others in sections.values():
        folder = (DOCS / first).parent
        links = re.findall(r"\]\(([\w/.-]+\.md)", (DOCS / first).read_text(encoding="utf-8"))
        linked = {(folder / link).resolve().relative_to(DOCS.resolve()).as_posix() for link in links}
        assert set(others) - linked == set(), first


def test_the_reference_has_everything_public() -> None:
    pages = [DOCS / "reference" / page for page in ("python.md", "types.md")]
    words = {*re.findall(r"\w+", "".join(page.read_text(encoding="utf-8") for page in pages))}
    assert {*weft.__all__} - {"__version__", "InputError", "RunError"} <= words


def test_pictures_are_small_and_ask_for_nothing() -> None:
    pictures = {path: path.read_bytes() for path in (DOCS / "pictures").iterdir()}
    assert all(len(content) < 150_000 for content in pictures.values())
    assert sum(map(len, pictures.values())) < 1_000_000
    drawn = {path.name: content for path, content in pictures.items() if path.suffix == ".svg"}
    assert drawn
    assert [name for name, content in drawn.items() if re.search(rb"url\([\"']?http|href=", content)] == []


def test_a_terminal_is_drawn_with_what_a_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_pictures, "FOLDER", tmp_path)
    make_pictures.draw_terminal("weft schedule gpipe --ranks 2", "schedule")
    light, dark = ((tmp_path / f"schedule-{scheme}.svg").read_text() for scheme in ("light", "dark"))
    assert light != dark
    for picture in (light, dark):
        assert "gpipe" in picture
        assert "font-face" not in picture


def test_a_reader_without_network_finds_a_page(tmp_path: Path, browser: Browser) -> None:
    docs, site = tmp_path / "docs", tmp_path / "site"
    (docs / "scripts").mkdir(parents=True)
    (docs / "index.md").write_text("# First\n\nNothing of interest.\n")
    (docs / "other.md").write_text("# Second\n\n## A heading\n\nThe shuttle carries yarn.\n")
    for name in ("site.css", "scripts/iframe-worker.js"):
        (docs / name).write_bytes((DOCS / name).read_bytes())
    # The theme's own settings, without what is made of weft itself.
    changed = {"docs_dir": str(docs), "site_dir": str(site), "nav": None, "hooks": []}
    changed["plugins"] = ["search", "offline"]
    mkdocs_build.build(mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), **changed))
    browser.open(site / "index.html")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.run(
        "const query = document.querySelector('[data-md-component=search-query]');"
        "query.value = 'shuttle'; query.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
    )
    found = browser.run(
        "new Promise((done) => { const timer = setInterval(() => {"
        "  const link = document.querySelector('.md-search-result__link');"
        "  if (link) { clearInterval(timer); done(link.getAttribute('href')); }"
        "}, 50); })"
    )
    assert "other.html" in found
    assert not [url for url in browser.requested() if not url.startswith(("file:", "data:", "about:"))]
