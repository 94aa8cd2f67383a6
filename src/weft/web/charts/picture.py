"""The frame of every picture: its size, its title and its styles."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 960

# Class names start with the project's name: a notebook page holds pictures of other packages, too.
STYLE = (
    ".weft-picture{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;"
    "--weft-ink:#1c1f24;--weft-soft:#5c6470;--weft-lane:#f1f2f4;--weft-page:#fff}"
    "@media(prefers-color-scheme:dark){.weft-picture{"
    "--weft-ink:#e8eaed;--weft-soft:#9aa3b0;--weft-lane:#1e232a;--weft-page:#14181d}}"
    ".weft-page{fill:var(--weft-page)}.weft-lane{fill:var(--weft-lane)}"
    ".weft-ink{fill:var(--weft-ink)}.weft-soft{fill:var(--weft-soft);font-size:11px}"
    ".weft-title{font-size:14px;font-weight:600}"
    ".weft-block{fill:#fff;font-size:11px;text-anchor:middle}.weft-end{text-anchor:end}"
    ".weft-middle{text-anchor:middle}.weft-grid{stroke:var(--weft-soft);stroke-opacity:.18}"
)


def picture_svg(parts: Iterable[str], height: int, *, title: str, description: str | None = None) -> str:
    """Return the parts as one picture of `WIDTH` x `height` pixels with a title, light or dark as the page.

    `description` is for screen readers; default: the title.
    """
    head = (
        f'<svg class="weft-picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(description or title)}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect class="weft-page" width="{WIDTH}" height="{height}" rx="6"/>'
        f'<text class="weft-ink weft-title" x="12" y="24">{escape(title)}</text>'
    )
    return head + "".join(parts) + "</svg>\n"
