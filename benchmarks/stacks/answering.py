"""What the programs share that ask a stack: they run in its environment, which has no weft, and import
nothing but the standard library and the stack.

    PYTHON in_STACK.py FOLDER

reads `cases.json` in the folder, a list of `{name, file, launch, ranks}`, and prints a JSON object per line:
first `{version}`, then `{name, said}` for each case, where `said` is empty if the stack takes the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MOST_CHARACTERS = 300


def answer(version: str, check: Callable[[Path, Mapping[str, Any]], None]) -> None:
    """Check every case; what a stack raises or exits with is its answer, what it prints is thrown away."""
    folder, out = Path(sys.argv[1]), sys.stdout
    print(json.dumps({"version": version}), file=out, flush=True)
    for case in json.loads((folder / "cases.json").read_text()):
        errors, environment = io.StringIO(), dict(os.environ)
        said = ""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            try:
                check(folder / case["file"], case)
            except SystemExit as end:
                said = _shown(errors.getvalue().strip() or str(end)) if end.code else ""
            except Exception as error:
                said = _shown(f"{type(error).__name__}: {error}")
            finally:
                os.environ.clear()
                os.environ.update(environment)
        print(json.dumps({"name": case["name"], "said": said}), file=out, flush=True)


def _shown(text: str) -> str:
    """The last words of a message in one line: what is wrong stands at the end of a usage text."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_CHARACTERS else f"... {words[-_MOST_CHARACTERS:]}"
