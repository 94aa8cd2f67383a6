"""Calls Calculon's command line once for each numbered question of a folder; runs in Calculon's own Python.

    python calculon_batch.py CLONE FOLDER COUNT

Question i is FOLDER/i.application.json, i.execution.json and i.system.json; the answer is i.stats.json, or
i.error.txt with why there is none. Starting Python anew for each would take longer than they do. Nothing of
weft is imported here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import runpy
import sys
from pathlib import Path


def answer(program: Path, folder: Path, number: int) -> str:
    """Ask one question; why there is no answer, empty where there is one."""
    files = [
        str(folder / f"{number}.{part}.json") for part in ("application", "execution", "system", "stats")
    ]
    sys.argv = [str(program), "llm", *files]
    printed = io.StringIO()
    code: object = None
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        code = end.code
    except AssertionError as error:
        return f"assertion: {error}" if str(error) else "an assertion of its own does not hold"
    finally:
        # Every call adds a handler to the one root logger.
        logging.getLogger().handlers.clear()
    return (printed.getvalue().strip() or f"exit code {code}") if code else ""


def main() -> None:
    clone, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    # In place of this file's own folder.
    sys.path[0] = str(clone)
    for number in range(count):
        if reason := answer(clone / "bin" / "calculon", folder, number):
            (folder / f"{number}.error.txt").write_text(reason, encoding="utf-8")


if __name__ == "__main__":
    main()
