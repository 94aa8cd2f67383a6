"""Tables for terminals by their layout: all are plain, and fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def folded_table(names: Iterable[str]) -> Table:
    """Return a table of words, each of which may take several lines."""
    table = plain_table()
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def ranked_table(figures: Iterable[str], words: str) -> Table:
    """Return a table of narrow figures first and words last, so that 80 columns cut nothing off."""
    table = plain_table()
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(words, overflow="fold")
    return table


def named_table(names: Sequence[str]) -> Table:
    """Return a table of a name and its figures."""
    table = plain_table()
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place), overflow="fold")
    return table
