"""Products and inverses of K-FAC's factors beside a plain product and a plain Cholesky inverse of the sizes.

Both run in turns in one thread, small ones several times, and the least time of each counts. Times are those
of the thread on a CPU, so that other load counts little. The last figure is the time of the inverse over that
of a product of n^3 operations, with which weft prices inverses.

    python benchmarks/curvature.py [--sizes 256 ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from figures import Value
from harness import Report, parser

from weft.methods.kfac.runtime.factors import DampedInverse, damped_inverse

SIZES, ROWS, ROUNDS = (256, 512, 1024, 2048, 4096), 2048, 7
DAMPING = 1e-2
# Operations on matrices of so many features take tens of milliseconds.
FEW_TIMES = 1024
# The largest shares of the plain operations.
TARGET = 1.1
SEED = 3


class Seconds(NamedTuple):
    """The least seconds of each operation on matrices of one size."""

    product: float
    plain_product: float
    inverse: float
    plain_inverse: float
    square_product: float

    @property
    def slowdown(self) -> float:
        """The inverse's time over that of a product of n^3 operations; n x n by n x n has twice as many."""
        return 2.0 * self.inverse / self.square_product


def plain_inverse(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def seconds_of(call: Callable[[], object], times: int, device: str) -> float:
    """Mean seconds of the thread on a CPU, and until all kernels have ended on a GPU."""
    clock = time.thread_time if device == "cpu" else time.perf_counter
    began = clock()
    for _ in range(times):
        call()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - began) / times


def least_seconds(calls: Sequence[Callable[[], object]], rounds: int, times: int, device: str) -> list[float]:
    """The least seconds of each call over rounds that alternate, after one that does not count."""
    found = [[seconds_of(call, times, device) for call in calls] for _ in range(rounds + 1)]
    return [min(one[1:]) for one in zip(*found, strict=True)]


def measured(size: int, rows: int, rounds: int, device: str = "cpu") -> Seconds:
    """The operations on factors of a size, in fp32, from so many rows."""
    generator = torch.Generator(device).manual_seed(SEED)
    tensor = torch.randn(rows, size, generator=generator, device=device)
    factor = DampedInverse(size, torch.float32, torch.device(device))
    factor.add(tensor, 1.0 / rows)
    matrix, damped = factor.sum.clone(), factor.sum.clone()
    damped.diagonal().add_(DAMPING)
    expected = torch.linalg.inv(damped.double())
    assert torch.allclose(damped_inverse(matrix, DAMPING).double(), expected, rtol=1e-2, atol=1e-2)
    calls = (
        lambda: factor.add(tensor, 1.0 / rows),
        lambda: tensor.T @ tensor,
        lambda: damped_inverse(matrix, DAMPING),
        lambda: plain_inverse(damped),
        lambda: matrix @ damped,
    )
    times = max(1, FEW_TIMES // size) ** 2
    return Seconds(*least_seconds(calls, rounds, times, device))


def figures_of(found: Seconds) -> dict[str, Value]:
    return {
        "product": Value(found.product, "s"),
        "over a plain product": Value(found.product / found.plain_product, "ratio", TARGET),
        "inverse": Value(found.inverse, "s"),
        "over a plain Cholesky inverse": Value(found.inverse / found.plain_inverse, "ratio", TARGET),
        "over a product of its operations": Value(found.slowdown, "ratio"),
    }


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    made.add_argument("--rounds", type=int, default=ROUNDS)
    return made


def main() -> None:
    asked = options().parse_args()
    torch.set_num_threads(1)
    report = Report("curvature", asked)
    report.print_machine()
    for size in asked.sizes:
        cell = f"{size} features, {ROWS} rows, fp32"
        if report.missing(cell):
            report.add_cell(cell, figures_of(measured(size, ROWS, asked.rounds)))


if __name__ == "__main__":
    main()
