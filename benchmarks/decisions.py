"""Files and lines that name a decision of a layout or a method: what adding one costs, before and after.

    python benchmarks/decisions.py                    # this checkout
    python benchmarks/decisions.py --before FOLDER    # beside another one

Counted are the Python files of `src/weft`: all of them, and those outside the method's own folder.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from figures import Value
from harness import Report, parser

HERE = Path(__file__).resolve().parents[1]

# The words of each decision, and the folder of its method.
DECISIONS: Mapping[str, tuple[str, str]] = {
    "gradient norm": (r"gradient_norm|gradient-norm", "methods/gradient_norm"),
    "islands": (r"island", "methods/sharding"),
    "context parallelism": (r"context_parallel", "run/context"),
    "context parallelism, its axis": (r"\bcp\b", "run/context"),
    "sharding": (r"zero-[0-3]|\bsharding\b", "methods/sharding"),
    "blocking": (r"\bblocking\b", "methods/blocking"),
    "recomputation": (r"recompute", "methods/recomputation"),
}


class Count(NamedTuple):
    files: int
    lines: int
    files_elsewhere: int


def count(folder: Path, words: str, own: str) -> Count:
    """Files that name it, their lines that do, and the files outside the folder of its own."""
    package, found, lines = folder / "src" / "weft", [], 0
    for path in sorted(package.rglob("*.py")):
        named = sum(bool(re.search(words, line)) for line in path.read_text().splitlines())
        found += [path.relative_to(package).as_posix()] if named else []
        lines += named
    return Count(len(found), lines, sum(not path.startswith(own) for path in found))


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--before", type=Path, help="another checkout")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("decisions", asked)
    report.print_machine()
    folders = {"before": asked.before, "now": HERE} if asked.before else {"now": HERE}
    for name, what in DECISIONS.items():
        for when, folder in folders.items():
            counts = count(folder, *what)._asdict()
            words = {word.replace("_", " "): Value(number, "count") for word, number in counts.items()}
            report.add_cell(f"{name}, {when}", words)


if __name__ == "__main__":
    main()
