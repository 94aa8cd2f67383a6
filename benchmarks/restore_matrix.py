"""Every plan restores what every plan saved: equal tensors, and the loss of the next step.

The plans and the steps on them are those of `tests/training/test_restore.py`, which tests some of the pairs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from harness import print_machine

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

from pool import WorkerPool  # noqa: E402
from test_restore import PLANS, Tensors, restore, save, together  # noqa: E402


def same(left: Tensors, right: Tensors) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def main() -> int:
    print_machine()
    pool = WorkerPool()
    numbers = {name: number for number, name in enumerate(PLANS, 1)}
    for name, number in numbers.items():
        print(f"{number}: {name}, {PLANS[name].ranks} ranks")
    print("\nrow: the plan that saved; column: the plan that restored and trained one more step")
    print("=: its loss is that of the plan that saved, bit by bit; otherwise the relative difference")
    print("      " + "".join(f"{number:>9}" for number in numbers.values()))
    unequal = 0
    try:
        for source, number in numbers.items():
            cells = []
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder) / "checkpoints"
                answers = pool.run(save, PLANS[source], directory, ranks=PLANS[source].ranks)
                saved, expected = together([tensors for tensors, _ in answers]), answers[0][1][0]
                for plan in PLANS.values():
                    found = pool.run(restore, plan, directory, ranks=plan.ranks)
                    equal = same(together([tensors for tensors, _ in found]), saved)
                    unequal += not equal
                    difference = abs(found[0][1][0] - expected) / expected
                    cells.append(f"{difference:.0e}" if difference else "=")
                    if not equal:
                        cells[-1] = "TENSORS"
            print(f"{number:>6}" + "".join(f"{cell:>9}" for cell in cells), flush=True)
    finally:
        pool.close()
    pairs = len(PLANS) ** 2
    print(f"{pairs - unequal} of {pairs} pairs restore equal tensors")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
