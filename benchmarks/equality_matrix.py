"""Every plan of the equality matrix, up to eight ranks, against one process in float64.

mesh (pp, dp, tp) x order x sharding x recomputation x clipping x heads, as `tests/equality_cases.py` has
them; the tests run a covering subset on up to four ranks.

    python benchmarks/equality_matrix.py             # all, about an hour on two cores
    python benchmarks/equality_matrix.py --every 20  # every twentieth
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from functools import cache
from itertools import groupby
from pathlib import Path

from figures import Value
from harness import Report, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from equality_cases import cases
from equality_table import TOLERANCE, differences, together, train
from one_process import Outcome, Training, alone
from pool import WorkerPool
from warm_starts import Template

RANKS = 8


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--every", type=int, default=1, help="run every n-th case")
    return made


def main() -> int:
    asked = options().parse_args()
    report = Report("equality_matrix", asked)
    report.print_machine()
    chosen = list(cases(RANKS))[:: asked.every]
    report.say(f"{len(chosen)} plans; largest difference from one process, tolerance {TOLERANCE:g}")
    with Template.start() as template, closing(WorkerPool(template, RANKS)) as pool:

        @cache
        def reference(training: Training) -> Outcome:
            return pool.run(alone, training, ranks=1)[0]

        cells = []
        for mesh, group in groupby(chosen, key=lambda row: (row.pp, row.dp, row.tp)):
            words = " x ".join(f"{axis} {size}" for axis, size in zip(("pp", "dp", "tp"), mesh, strict=True))
            cells.append(cell := words if asked.every == 1 else f"{words}, one of {asked.every}")
            if not report.missing(cell):
                continue
            sizes = {}
            for row in group:
                plan = row.plan
                found = together(pool.run(train, row, plan, ranks=plan.ranks))
                sizes[row] = max(differences(found, reference(row.training(plan))).values())
            unequal = [row for row, size in sizes.items() if not size <= TOLERANCE]
            for row in unequal:
                report.say(f"UNEQUAL: {row}")
            largest = Value(max(sizes.values()), "ratio", TOLERANCE)
            report.add_outcome(cell, len(sizes), len(unequal), largest=largest)
    failed = sum(report.values(cell)["failed"] for cell in cells)
    report.say(f"{len(chosen) - failed:.0f} of {len(chosen)} equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
