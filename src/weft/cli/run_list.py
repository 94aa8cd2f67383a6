"""The command that lists runs: `runs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.cli.output import Json, console, plain_table, print_json
from weft.errors import InputError, Violation
from weft.training.directory.overview import RunOverview, look_at, runs_in
from weft.web.rows.run import LIST_HEAD, list_cells

HEAD = ("run", "model", "state", *LIST_HEAD)
# Columns that a narrow terminal lacks, the least useful first.
LEFT_OUT = ("tokens/s", "held out", "predicted", "model")


def runs(folder: Path = Path("runs"), /, *, json: Json = False) -> None:
    """List the runs of a folder, the newest first, with newest figures.

    - `weft runs`

    Parameters
    ----------
    folder
        A folder of run directories, or one of them.
    """
    if not folder.is_dir():
        why = "a file, not a folder of runs" if folder.exists() else "no such folder"
        raise InputError(Violation(str(folder), why))
    found: list[RunOverview] = []
    problems: list[Violation] = []
    for path in runs_in(folder):
        try:
            found.append(look_at(path))
        except InputError as error:
            problems += error.violations
    if problems and not found:
        raise InputError(problems)
    found.sort(key=lambda one: one.newest_s, reverse=True)
    if json:
        print_json({"runs": [_record(one) for one in found], "unreadable": [str(one) for one in problems]})
        return
    if not found:
        raise InputError(Violation(str(folder), "has no runs; `weft train` makes one"))
    out = console()
    out.print(runs_table(found, out.width))
    for problem in problems:
        console().print(f"not listed: {problem}", style="yellow")


def _record(one: RunOverview) -> dict[str, Any]:
    return {**asdict(one), "path": str(one.path), "state": str(one.state)}


def runs_table(found: Sequence[RunOverview], width: int) -> Table:
    """Return a row for each run, with the columns that fit into so many characters."""
    rows = [HEAD, *((one.path.name, one.model, str(one.state), *list_cells(one)) for one in found)]
    widths = {name: max(map(len, cells)) for name, *cells in zip(HEAD, *rows, strict=True)}
    for name in LEFT_OUT:
        if sum(widths.values()) + 2 * (len(widths) - 1) > width:
            del widths[name]
    table = plain_table()
    for place, name in enumerate(HEAD):
        if name in widths:
            table.add_column(
                name,
                justify="right" if place > 2 else "left",
                style="bold" if name == "run" else "",
                no_wrap=name != "run",
                overflow="fold",
            )
    for cells in rows[1:]:
        table.add_row(*(Text(cell) for name, cell in zip(HEAD, cells, strict=True) if name in widths))
    return table
