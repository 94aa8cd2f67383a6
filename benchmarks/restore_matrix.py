"""Every plan restores what every plan saved: equal tensors, and the loss of the next step.

The plans and the steps on them are those of `tests/training/test_restore.py`, which tests some of the pairs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import torch
from figures import Value
from harness import Report, parser

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

from pool import WorkerPool  # noqa: E402
from test_restore import PLANS, Tensors, restore, save, together  # noqa: E402
from warm_starts import Template  # noqa: E402


def same(left: Tensors, right: Tensors) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def row_of(report: Report, pool: WorkerPool, source: str) -> None:
    """What every plan restores of what one has saved."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoints"
        answers = pool.run(save, PLANS[source], directory, ranks=PLANS[source].ranks)
        saved, expected = together([tensors for tensors, _ in answers]), answers[0][1][0]
        words, unequal, largest = [], 0, 0.0
        for plan in PLANS.values():
            found = pool.run(restore, plan, directory, ranks=plan.ranks)
            equal = same(together([tensors for tensors, _ in found]), saved)
            unequal += not equal
            difference = abs(found[0][1][0] - expected) / expected
            largest = max(largest, difference)
            words.append("TENSORS" if not equal else f"{difference:.0e}" if difference else "=")
    report.say("".join(f"{word:>9}" for word in words))
    report.add_outcome(source, len(PLANS), unequal, loss=Value(largest, "ratio"))


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> int:
    report = Report("restore_matrix", options().parse_args())
    report.print_machine()
    report.say("a row: the plan that saved; a column: the plan that restored and trained one more step")
    report.say("=: its loss is that of the plan that saved, bit by bit; otherwise the relative difference")
    with Template.start() as template, closing(WorkerPool(template)) as pool:
        for source in PLANS:
            if report.missing(source):
                row_of(report, pool, source)
    unequal = sum(report.values(source)["failed"] for source in PLANS)
    pairs = len(PLANS) ** 2
    report.say(f"{pairs - unequal:.0f} of {pairs} pairs restore equal tensors")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
