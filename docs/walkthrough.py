"""Pages that a reader follows step by step: `python docs/walkthrough.py PAGE ...` renews what they print.

Of fenced blocks, one with a title is a file that the reader writes, `sh` has a command on each line, and a
`text` that follows it shows what they print. All of a page happens in one folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from weft.cli.main import run

FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Columns of a block on the site.
WIDTH = 100


@dataclass(frozen=True)
class Step:
    """Commands, their exit codes and all that they print; `shown` is the block in which the page shows it."""

    commands: tuple[str, ...]
    exit_codes: tuple[int, ...]
    printed: str
    shown: re.Match[str] | None


def follow(page: str) -> Iterator[Step]:
    """Write the page's files into the working folder, and run its commands, in order."""
    blocks = [*FENCED.finditer(page)]
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        kind, title, text = block.groups()
        if title:
            Path(title).write_text(text, encoding="utf-8")
        elif kind == "sh":
            commands = tuple(text.replace("\\\n", " ").splitlines())
            answers = [answer(command) for command in commands]
            shows = after is not None and after[1] == "text" and not page[block.end() : after.start()].strip()
            codes = tuple(code for code, _ in answers)
            printed = "".join(printed for _, printed in answers)
            yield Step(commands, codes, printed, after if shows else None)


def answer(command: str) -> tuple[int, str]:
    """Return a command's exit code and all that a terminal of the site's width shows of it."""
    name, *arguments = shlex.split(command, comments=True)
    if name != "weft":
        raise ValueError(f"{command}: only commands of weft can be followed")
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(WIDTH)),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        code = run(arguments)
    return code, "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def renewed(page: str) -> str:
    """Return the page with what its commands print now.

    Raises:
        ValueError: when a command fails.
    """
    for step in reversed([*follow(page)]):
        if any(step.exit_codes):
            raise ValueError("\n".join([*step.commands, step.printed]))
        if step.shown is not None:
            page = page[: step.shown.start(3)] + step.printed + page[step.shown.end(3) :]
    return page


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        absolute = path.resolve()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            mock.patch.dict(os.environ, WEFT_HOME=folder),
        ):
            absolute.write_text(renewed(absolute.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"renewed {path}")


if __name__ == "__main__":
    main()
