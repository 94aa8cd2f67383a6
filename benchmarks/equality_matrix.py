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

from equality_matrix import Case, Outcome, alone, cases, difference, train
from pool import WorkerPool

RANKS = 8
TOLERANCE = 1e-9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="run every n-th case")
    chosen = list(cases(RANKS))[:: parser.parse_args().every]
    print_machine()
    print(f"{len(chosen)} plans; largest difference from one process, tolerance {TOLERANCE:g}")
    pool = WorkerPool(RANKS)

    @cache
    def reference(dp: int, clips: bool, headed: bool) -> Outcome:
        case = Case(1, dp, 1, ("gpipe", 1), "zero-0", "none", clips, headed)
        return pool.run(alone, case, ranks=1)[0]

    unequal, began = [], time.monotonic()
    try:
        for mesh, group in groupby(chosen, key=lambda case: (case.pp, case.dp, case.tp)):
            differences = {}
            for case in group:
                found = pool.run(train, case, ranks=case.ranks)
                differences[case] = difference(found, reference(case.dp, case.clips, case.headed))
            unequal += [case for case, size in differences.items() if not size <= TOLERANCE]
            words = " x ".join(f"{axis} {size}" for axis, size in zip(("pp", "dp", "tp"), mesh, strict=True))
            print(
                f"{words}: {len(differences):>4} plans, at most {max(differences.values()):.1e}", flush=True
            )
    finally:
        pool.close()
    for case in unequal:
        print(f"UNEQUAL: {case}")
    print(f"{len(chosen) - len(unequal)} of {len(chosen)} equal, {time.monotonic() - began:.0f} s")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
