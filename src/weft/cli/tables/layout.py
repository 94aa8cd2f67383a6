"""Layouts of tables for terminals: all are plain and fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def folded_table(names: Iterable[str]) -> Table:
    """Return a table of text columns; a cell may take several lines."""
    table = plain_table()
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def ranked_table(figures: Iterable[str], words: str) -> Table:
    """Return a table of narrow figures and a last column of words, to fit 80 columns uncut."""
    table = plain_table()
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(words, overflow="fold")
    return table


def named_table(names: Sequence[str]) -> Table:
    """Return a table with names in the first column and figures in the others."""
    table = plain_table()
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place), overflow="fold")
    return table
