"""A peer's own program: where it lies, the Python that runs it, and how long it may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, RunError, Violation

LIMIT_S = 300.0
OUTPUT = "output.txt"
_ERRORS = "errors.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProgram:
    """A clone of a peer's repository, which is run in a process of its own and never imported.

    Attributes:
        name: how messages call it.
        root: the clone.
        python: the interpreter that runs it; None: that of `root/.venv`, else the one that runs weft.
        limit_s: seconds after which it is ended.
    """

    name: str
    root: Path
    python: str | None = None
    limit_s: float = LIMIT_S

    def __post_init__(self) -> None:
        if not self.limit_s > 0.0:
            problem = f"{self.limit_s:g}: a program needs some seconds"
            raise InputError(Violation("--seconds", problem, f"{LIMIT_S:g}"))

    def require(self, *needed: str) -> None:
        """Refuse a folder that lacks the files that are run.

        Raises:
            InputError: naming the first that is missing.
        """
        missing = [name for name in needed if not (self.root / name).is_file()]
        if missing:
            problem = f"{self.root} has no {missing[0]}; it must be a clone of the program's repository"
            raise InputError(Violation(f"--{self.name}", problem))

    def run(self, arguments: Sequence[str], folder: Path) -> Path:
        """Run Python with these arguments in `folder`, and give the file with all that it printed.

        The program and what it started are ended when the time is over.

        Raises:
            RunError: when it cannot be started, takes too long or fails, with the last line of its errors.
        """
        printed, errors = folder / OUTPUT, folder / _ERRORS
        # Sets of its own are walked through in one order; weft's own paths stay outside.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        with printed.open("wb") as output, errors.open("wb") as complaints:
            try:
                process = subprocess.Popen(
                    [self._interpreter, *arguments],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=complaints,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(
                    f"{self.name}: {self._interpreter} cannot be started: {error.strerror}"
                ) from None
            try:
                code = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                raise RunError(f"{self.name}: no answer within {self.limit_s:g} s; it was ended") from None
            finally:
                _end(process)
        if code:
            raise RunError(f"{self.name}: its program failed with exit code {code}: {_last_line(errors)}")
        return printed

    @property
    def _interpreter(self) -> str:
        """Absolute where it is a path, for the program runs in a folder of its own."""
        if self.python is not None:
            return str(Path(self.python).absolute()) if os.sep in self.python else self.python
        own = self.root.absolute() / ".venv" / "bin" / "python"
        return str(own) if own.is_file() else sys.executable


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all of its session, where any of it still runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "it said nothing"
