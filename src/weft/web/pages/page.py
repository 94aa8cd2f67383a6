"""A self-contained page of pictures and tables, in the style of `report.html`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Protocol

from weft import __version__
from weft.web.charts.picture import STYLE

_MARKER = re.compile(r"\{\{(\w+)\}\}")


def page_html(title: str, subtitle: str, sections: Sequence[str], scripts: Sequence[str] = ()) -> str:
    """Return the page as text; `sections` are markup, and pictures hold its only styles.

    `scripts` are further files of `static/`, whose data sections hold as JSON.
    """
    css, script = static_text("report.css"), "\n".join(map(static_text, ("save.js", *scripts)))
    policy = " ".join(f"'{policy_hash(style)}'" for style in (css, STYLE))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Pictures set their width in a style attribute, which no hash can admit.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"script-src '{policy_hash(script)}'; style-src-elem {policy}; style-src-attr 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">"
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} - weft</title><style>{css}</style></head>"
        f'<body class="plain"><header><h1>{escape(title)}</h1>'
        f'<p class="subtitle">{escape(subtitle)}</p></header>'
        f"<main>{''.join(sections)}</main>"
        f"<footer>Written by weft {escape(__version__)}. This file is complete: it loads nothing.</footer>"
        f'<script type="module">{script}</script></body></html>\n'
    )


def table_section(
    name: str,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[str] = (),
) -> str:
    """Return a table below its title; columns except the first and those in `words` are numbers."""
    numbers = [text not in words for text in head]
    columns = "".join(
        f'<th scope="col"{" class=number" if place and numbers[place] else ""}>{escape(text)}</th>'
        for place, text in enumerate(head)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f"<td{' class=number' if number else ''}>{escape(cell)}</td>"
            for cell, number in zip(row[1:], numbers[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
    return section_html(name, escape(title), scrolling(name, table))


class Drawing(Protocol):
    """A function of `charts/` with its data: it draws them, with a title above or for readers alone."""

    def __call__(self, *, title: str, headed: bool) -> str: ...


def picture_section(name: str, title: str, draw: Drawing) -> str:
    """Return a picture below its title, with a button that saves it."""
    picture = f'<div class="picture">{draw(title=title, headed=False)}</div>'
    return section_html(name, escape(title), scrolling(name, picture), saved=True)


def section_html(name: str, title: str, inside: str, *, saved: bool = False) -> str:
    """Return markup below its title, which is markup, too; `saved` adds the button of `save.js`."""
    heading = f'<h2 id="{name}-title">{title}</h2>'
    if saved:
        button = (
            f'<button type="button" class="save" id="{name}-save" '
            f'aria-labelledby="{name}-save {name}-title" hidden>save as SVG</button>'
        )
        heading = f'<div class="section-head">{heading}{button}</div>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{inside}</section>'


def scrolling(name: str, inside: str) -> str:
    """Return markup that scrolls sideways where it is wider than the page, also by keyboard."""
    return f'<div class="scroll" role="group" aria-labelledby="{name}-title" tabindex="0">{inside}</div>'


def scripted_page(
    template: str, styles: Sequence[str], scripts: Sequence[str], data: object, parts: Mapping[str, str]
) -> str:
    """Return a page of `static/` with its styles, scripts and data, which a security policy admits alone.

    Args:
        template: a file with markers such as `{{title}}`. styles, scripts: files, joined in this order.
        data: what the scripts read.
        parts: the markup for the template's other markers.
    """
    style, script = ("\n".join(static_text(name) for name in names) for names in (styles, scripts))
    own = {
        "version": escape(__version__),
        "data": json_for_script(data),
        "style": style,
        "script": script,
        "style_hash": policy_hash(style),
        "script_hash": policy_hash(script),
    }
    every = {**parts, **own}
    # One pass: a name that looks like a marker is never replaced.
    return _MARKER.sub(lambda match: every[match[1]], static_text(template))


def json_for_script(record: object) -> str:
    """Return JSON without <, > and &: no string in it can end its script element."""
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def static_text(name: str) -> str:
    """Return the text of a file of `static/`."""
    return files("weft.web.pages").joinpath("static", name).read_text(encoding="utf-8")


def policy_hash(text: str) -> str:
    """Return the hash with which a page's content security policy admits this style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
