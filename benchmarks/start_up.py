"""How long a user waits: importing weft, and the first answer of the planner in a fresh process."""

from __future__ import annotations

import subprocess
import sys

from harness import median_s, print_machine, report


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    print_machine()
    empty = median_s(lambda: python("-c", "pass"))
    report(
        "import weft (without starting Python)", median_s(lambda: python("-c", "import weft")) - empty, 0.3
    )
    plan = ("-m", "weft.cli.main", "plan", "llama-13b", "--on", "64xa100-80gb")
    report("weft plan llama-13b --on 64xa100-80gb", median_s(lambda: python(*plan), 3), 5.0)
    report("weft schedule breadth-first", median_s(lambda: python(*plan[:2], "schedule", "breadth-first"), 3))


if __name__ == "__main__":
    main()
