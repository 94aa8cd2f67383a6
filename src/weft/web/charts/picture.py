"""The frame of every picture: its size, its title and its styles."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from weft.program.kinds import name_hash

WIDTH = 960
# Pixels of a picture's title.
HEAD = 34

# Class names start with the project's name: a notebook page holds pictures of other packages, too.
STYLE = (
    ".weft-picture{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;"
    "--weft-ink:#1c1f24;--weft-soft:#5c6470;--weft-lane:#f1f2f4;--weft-page:#fff}"
    "@media(prefers-color-scheme:dark){.weft-picture{"
    "--weft-ink:#e8eaed;--weft-soft:#9aa3b0;--weft-lane:#1e232a;--weft-page:#14181d}}"
    ".weft-page{fill:var(--weft-page)}.weft-lane{fill:var(--weft-lane)}"
    ".weft-ink{fill:var(--weft-ink)}.weft-soft{fill:var(--weft-soft);font-size:11px}"
    ".weft-title{font-size:14px;font-weight:600}"
    ".weft-block,.weft-blocks text{fill:#fff;font-size:11px;text-anchor:middle}.weft-end{text-anchor:end}"
    ".weft-mark{fill:none;stroke:var(--weft-ink);stroke-width:1.6}"
    ".weft-halo{stroke:var(--weft-page);stroke-width:4;stroke-linejoin:round;paint-order:stroke}"
    ".weft-middle{text-anchor:middle}.weft-grid{stroke:var(--weft-soft);stroke-opacity:.18}"
)


def picture_svg(
    parts: Iterable[str], height: int, *, title: str, description: str | None = None, headed: bool = True
) -> str:
    """Return the parts as one picture of `WIDTH` x `height` pixels, light or dark as the page.

    Args:
        description: for screen readers; default: the title.
        headed: draw the title above the parts, in the first `HEAD` pixels; a page has it as a heading.
    """
    top = 0 if headed else HEAD
    heading = f'<text class="weft-ink weft-title" x="12" y="24">{escape(title)}</text>' if headed else ""
    head = (
        f'<svg class="weft-picture" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 {top} {WIDTH} {height - top}" '
        f'width="{WIDTH}" height="{height - top}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(description or title)}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect class="weft-page" y="{top}" width="{WIDTH}" height="{height - top}" rx="6"/>{heading}'
    )
    return head + "".join(parts) + "</svg>\n"


_KNOWN = {
    "forward": "#2b6cd4",
    "backward": "#1a7f55",
    "backward_input": "#14807c",
    "backward_weight": "#5a7d1f",
    "send_activation": "#5d83b8",
    "receive_activation": "#7d8fa8",
    "send_gradient": "#5b9a80",
    "receive_gradient": "#82998f",
    "gather": "#b0578d",
    "free": "#6c7179",
    "reduce": "#b8473d",
    "reduce_across": "#a3493a",
    "reduce_tied": "#8a2f5b",
    "norm": "#6d4a8a",
    "step": "#7a4fc0",
}
# Kinds registered by third parties take one of these colours, chosen by a hash of their name.
_OTHERS = ("#a85a14", "#8c6d1f", "#a0468f", "#4a6fa5", "#7d5a4f", "#3f7d8c")

_DARKEST = 0.34


def kind_colour(kind: str) -> str:
    """Return the colour of a kind's name, as ``#rrggbb``."""
    return _KNOWN.get(kind, _OTHERS[name_hash(kind) % len(_OTHERS)])


def shaded(colour: str, shade: float) -> str:
    """Return `colour` mixed with black; `shade` goes from 0 (unchanged) to 1 (34 % black)."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel * (1 - _DARKEST * shade)):02x}" for channel in channels)
