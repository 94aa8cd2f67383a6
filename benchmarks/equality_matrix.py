"""Every plan of the equality matrix, up to eight ranks, against one process in float64.

mesh (pp, dp, tp) x order x sharding x recomputation x clipping x heads, as `tests/equality_matrix.py` has
them; the tests run a covering subset on up to four ranks.

    python benchmarks/equality_matrix.py             # all, about an hour on two cores
    python benchmarks/equality_matrix.py --every 20  # every twentieth
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache
from itertools import groupby
from pathlib import Path

from harness import print_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from equality_matrix import cases
from equality_table import TOLERANCE, differences, together, train
from one_process import Outcome, Training, alone
from pool import WorkerPool

RANKS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="run every n-th case")
    chosen = list(cases(RANKS))[:: parser.parse_args().every]
    print_machine()
    print(f"{len(chosen)} plans; largest difference from one process, tolerance {TOLERANCE:g}")
    pool = WorkerPool(RANKS)

    @cache
    def reference(training: Training) -> Outcome:
        return pool.run(alone, training, ranks=1)[0]

    unequal, began = [], time.monotonic()
    try:
        for mesh, group in groupby(chosen, key=lambda row: (row.pp, row.dp, row.tp)):
            sizes = {}
            for row in group:
                plan = row.plan
                found = together(pool.run(train, row, plan, ranks=plan.ranks))
                sizes[row] = max(differences(found, reference(row.training(plan))).values())
            unequal += [row for row, size in sizes.items() if not size <= TOLERANCE]
            words = " x ".join(f"{axis} {size}" for axis, size in zip(("pp", "dp", "tp"), mesh, strict=True))
            print(f"{words}: {len(sizes):>4} plans, at most {max(sizes.values()):.1e}", flush=True)
    finally:
        pool.close()
    for row in unequal:
        print(f"UNEQUAL: {row}")
    print(f"{len(chosen) - len(unequal)} of {len(chosen)} equal, {time.monotonic() - began:.0f} s")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
