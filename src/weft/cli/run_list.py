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
    console().print(runs_table(found))
    for problem in problems:
        console().print(f"not listed: {problem}", style="yellow")


def _record(one: RunOverview) -> dict[str, Any]:
    return {**asdict(one), "path": str(one.path), "state": str(one.state)}


def runs_table(found: Sequence[RunOverview]) -> Table:
    """Return a row for each run."""
    table = plain_table()
    for place, name in enumerate(HEAD):
        table.add_column(name, justify="right" if place > 2 else "left", no_wrap=place > 1, overflow="fold")
    for one in found:
        table.add_row(Text(one.path.name, style="bold"), one.model, str(one.state), *list_cells(one))
    return table
