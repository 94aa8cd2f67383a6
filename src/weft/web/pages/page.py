"""A self-contained page of pictures and tables, in the style of `report.html`, without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from html import escape
from importlib.resources import files

from weft import __version__
from weft.web.charts.picture import STYLE


def page_html(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """Return the page as text; `sections` are markup without scripts, and pictures hold its only styles."""
    css = static_text("report.css")
    policy = " ".join(f"'{policy_hash(style)}'" for style in (css, STYLE))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Pictures set their width in a style attribute, which no hash can admit.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src-elem {policy}; style-src-attr 'unsafe-inline'\">"
        f"<title>{escape(title)} - weft</title><style>{css}</style></head>"
        f"<body><header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>"
        f"<main>{''.join(sections)}</main>"
        f"<footer>Written by weft {escape(__version__)}. This file is complete: it loads nothing.</footer>"
        "</body></html>\n"
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
    return section_html(name, escape(title), f'<div class="scroll">{table}</div>')


def picture_section(name: str, title: str, svg: str) -> str:
    """Return a picture below its title."""
    return section_html(name, escape(title), svg)


def section_html(name: str, title: str, inside: str) -> str:
    """Return markup below its title, which is markup, too."""
    heading = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{inside}</section>'


def static_text(name: str) -> str:
    """Return the text of a file of `static/`."""
    return files("weft.web.pages").joinpath("static", name).read_text(encoding="utf-8")


def policy_hash(text: str) -> str:
    """Return the hash with which a page's content security policy admits this style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
