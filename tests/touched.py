"""Run the tests that a change touches, nearest first, for at most a minute.

    python tests/touched.py            # what is not committed; else the last commit
    python tests/touched.py main       # what has changed since main

Nearest are changed tests and those that mirror a changed file. Tests that import it follow, and then those
that import one of its importers. Laws have ten cases. When the time is over, the other tests are skipped.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET_S = 50
# Seconds since the epoch at which no further test begins (`tests/conftest.py`).
UNTIL = "WEFT_TESTS_UNTIL"
KINDS = "not examples and not compiler and not tables"


def changed(since: str | None, root: Path = ROOT) -> set[Path]:
    """Return the Python files that have changed, from the root on."""
    if since is None:
        found = _git(root, "diff", "--name-only", "HEAD")
        found |= _git(root, "ls-files", "--others", "--exclude-standard")
        found = found or _git(root, "diff", "--name-only", "HEAD~1")
    else:
        found = _git(root, "diff", "--name-only", since)
    return {Path(name) for name in found if name.endswith(".py") and (root / name).exists()}


def _git(root: Path, *words: str) -> set[str]:
    told = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.stderr.strip())
    return set(told.stdout.splitlines())


def module_of(path: Path) -> str:
    """Return the name under which other files import this one."""
    parts = path.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def imported(text: str) -> Iterator[str]:
    """Yield the modules, and perhaps names inside them, that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def nearest_first(changes: Iterable[Path], imports: Mapping[Path, set[str]]) -> list[Path]:
    """Return the test files that changes touch, nearest first; `imports` has all files of the repository."""
    changes = set(changes)
    mirrors = {f"test_{path.stem}" for path in changes if path.parts[0] == "src"}
    near = {path for path in imports if path in changes or path.stem in mirrors}
    modules = {module_of(path) for path in changes} - {""}
    importers = {path for path, names in imports.items() if names & modules}
    further = set(map(module_of, importers))
    last = {path for path, names in imports.items() if names & further}
    ordered = dict.fromkeys(path for files in (near, importers, last) for path in sorted(files))
    return [path for path in ordered if path.parts[0] == "tests" and path.name.startswith("test_")]


def main(since: str | None) -> int:
    files = (path for room in ("src", "tests") for path in sorted((ROOT / room).rglob("*.py")))
    imports = {path.relative_to(ROOT): set(imported(path.read_text(encoding="utf-8"))) for path in files}
    tests = nearest_first(changed(since), imports)
    if not tests:
        print("no test imports what has changed")
        return 0
    print(f"{len(tests)} test files; no test begins after {BUDGET_S} s", flush=True)
    environment = os.environ | {"WEFT_EXAMPLES": "10", UNTIL: str(time.time() + BUDGET_S)}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-m", KINDS, *map(str, tests)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:2] or [None])))
