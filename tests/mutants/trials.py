"""Trials of mutations: each is applied to a copy of the tree, where its tests then run."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory

from mutants.mutations import Mutation

# Of the tree, what tests need.
COPIED = ("src", "tests", "benchmarks", "examples", "pyproject.toml", "CONTRIBUTING.md")
# Those of `make tables`, too.
MARKED = "not examples and not compiler"
# Tests that wait forever for what a mutation has taken away have noticed it.
LIMIT_S = 600.0


class Verdict(StrEnum):
    """What tests say of a mutation."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN: its tests do not run"


class Trials:
    """Trials on one copy of a tree, which is whole again after each.

    Args:
        root: the tree, which stays as it is.
        copy: an empty folder.
    """

    def __init__(self, root: Path, copy: Path) -> None:
        self._copy = copy
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        # Once for all trials, known by its content: a change may be as old and as long as what it replaces.
        for name in ("src", "tests"):
            compileall.compile_dir(copy / name, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)

    def passes(self, tests: Sequence[str]) -> bool:
        """Whether these tests pass on the tree as it is."""
        return self._exit_code(tests, limit_s=None) == 0

    def verdict(self, mutation: Mutation) -> Verdict:
        """Run the mutation's tests, which pass without it.

        Raises:
            StaleError: when the source no longer has the piece.
        """
        changed = self._copy / mutation.file
        text = changed.read_text(encoding="utf-8")
        try:
            changed.write_text(mutation.applied(text), encoding="utf-8")
            code = self._exit_code(mutation.tests, limit_s=LIMIT_S)
        finally:
            changed.write_text(text, encoding="utf-8")
        return {0: Verdict.SURVIVED, 1: Verdict.CAUGHT}.get(code, Verdict.BROKEN)

    def _exit_code(self, tests: Sequence[str], *, limit_s: float | None) -> int:
        """pytest's; 1, as of a failure, where it had to be killed."""
        words = ["-m", "pytest", "-m", MARKED, "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command = [sys.executable, *words, *tests]
        environment = os.environ | {
            # Hypothesis tries the same examples every time.
            "CI": "true",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self._copy / "src"),
            "WEFT_HOME": str(self._copy / "home"),
        }
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command,
            cwd=self._copy,
            env=environment,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        ) as started:
            try:
                return started.wait(limit_s)
            except subprocess.TimeoutExpired:
                return 1
            finally:
                # With the processes that its tests have started.
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)


@contextmanager
def trials(root: Path) -> Iterator[Trials]:
    """Trials on a copy that is removed at the end of the block."""
    with TemporaryDirectory(prefix="weft-mutants-") as folder:
        yield Trials(root, Path(folder))
