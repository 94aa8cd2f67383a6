"""A live page beside a training, in a process of its own.

python -m weft.watch.beside RUN_DIR PARENT_PID
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from weft.errors import InputError
from weft.run.launch.lifeline import die_with_parent
from weft.watch.server import DEFAULT_PORT, listen, serve, the_token

TIMEOUT_S = 5.0
STANDARD_ERROR = 2


class PageBeside:
    """The live page of a run while this process trains it; a context that ends the page's process.

    The page is open from the first `show` on. It prints its address on standard error.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def show(self, run_dir: Path) -> None:
        """Start the page's process if it was not started before."""
        if self._process is None:
            command = [sys.executable, "-m", "weft.watch.beside", str(run_dir), str(os.getpid())]
            # Ctrl-C stops the training first, and the page shows it.
            self._process = subprocess.Popen(command, stdout=STANDARD_ERROR, start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(run_dir: Path, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    try:
        listener = listen(DEFAULT_PORT)
    except InputError:  # another page has it
        listener = listen(0)
    serve(run_dir, listener, the_token())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
