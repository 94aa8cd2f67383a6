"""Files and lines that name a decision of a layout or a method: what adding one costs, before and after.

    python benchmarks/decisions.py                    # this checkout
    python benchmarks/decisions.py --before FOLDER    # beside another one
    python benchmarks/decisions.py --json

Counted are the Python files of `src/weft`: all of them, and those outside the method's own folder.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folders = {"before": asked.before, "now": HERE} if asked.before else {"now": HERE}
    table = {
        name: {when: count(folder, *what)._asdict() for when, folder in folders.items()}
        for name, what in DECISIONS.items()
    }
    if asked.json:
        print(json.dumps(table, indent=1))
        return
    print(f"{'':32}" + "".join(f"{when:>8}: files  lines  elsewhere" for when in folders))
    for name, counts in table.items():
        columns = ((one["files"], one["lines"], one["files_elsewhere"]) for one in counts.values())
        print(f"{name:32}{''.join('{:>15}{:>7}{:>11}'.format(*column) for column in columns)}")


if __name__ == "__main__":
    main()
