"""Collectives among numbers of ranks that were not measured: predicted from the others, and measured.

Four ranks measure collectives in groups of 2, 3 and 4 by bytes, as `weft measure` does. Then each number is
left out and predicted from the other two. Beside it stands the prediction without this number of ranks in
the tables: an all-reduce scaled from the fewest ranks, and the described link for the rest. The error of a
cell is the geometric mean over sizes of the larger of measured / predicted and predicted / measured, less 1.

    python benchmarks/collective_ranks.py [--rounds N]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace

import torch
from figures import Value
from harness import Report, launch, parser_of_ranks

from weft.capture.collectives import CALLS, collective_tables
from weft.capture.machine import ON_CPU
from weft.describe.this_machine import this_machine
from weft.predict.cost.measured_collectives import collective_s
from weft.predict.cost.network import Network
from weft.predict.profile import Table
from weft.run.launch.worker_start import start_worker

RANKS, COUNTS = 4, (2, 3, 4)
REPEATS = 5


def off(predicted: list[float], measured: list[float]) -> float:
    pairs = zip(predicted, measured, strict=True)
    return math.exp(statistics.mean(abs(math.log(one / other)) for one, other in pairs)) - 1.0


def described_s(collective: str, ranks: int, moved_bytes: float) -> float:
    """Return the seconds on the link that this machine has before any measurement."""
    here = this_machine()
    network = Network(cluster=replace(here, groups=(replace(here.groups[0], devices=RANKS),)))
    return float(getattr(network, collective)(range(ranks), int(moved_bytes)).seconds)


def formerly_s(collective: str, tables: dict[int, Table], ranks: int, moved_bytes: float) -> float:
    """Return the seconds of an all-reduce by the table of the fewest ranks alone, else of the link."""
    if collective != "all_reduce":
        return described_s(collective, ranks, moved_bytes)
    fewest = min(tables)
    return collective_s({fewest: tables[fewest]}, ranks, moved_bytes)


def run(report: Report, asked: argparse.Namespace) -> None:
    context, cpu = start_worker(), torch.device("cpu")
    found: dict[str, dict[int, list[Table]]] = {name: {count: [] for count in COUNTS} for name in CALLS}
    for repeat in range(REPEATS):
        for count in COUNTS:
            taken = collective_tables(count, cpu, ON_CPU.reduce, name=str(repeat), rounds=asked.rounds)
            for name, table in taken.items():
                found[name][count].append(table)
    if context.rank == 0:
        for name, by_count in found.items():
            tables = {count: median(repeats) for count, repeats in by_count.items()}
            for left_out in COUNTS:
                report_left_out(report, name, tables, left_out)
    context.close()


def report_left_out(report: Report, name: str, tables: dict[int, Table], left_out: int) -> None:
    measured = tables[left_out]
    others = {count: table for count, table in tables.items() if count != left_out}
    predicted = [collective_s(others, left_out, size) for size, _ in measured]
    formerly = [formerly_s(name, others, left_out, size) for size, _ in measured]
    rows = zip(measured, predicted, formerly, strict=True)
    each = (
        f"{size / 1024:.0f} KiB {one * 1e3:.2f} ms ({guess * 1e3:.2f}, {former * 1e3:.2f})"
        for (size, one), guess, former in rows
    )
    report.say(f"{name} of {left_out}, measured (predicted, without): {', '.join(each)}")
    seconds = [one for _, one in measured]
    errors = {"error": off(predicted, seconds), "error without it": off(formerly, seconds)}
    cell = {what: Value(error, "share") for what, error in errors.items()}
    report.add_cell(f"{name} of {left_out} ranks", cell)


def median(repeats: list[Table]) -> Table:
    return tuple(
        (rows[0][0], statistics.median(row[1] for row in rows)) for rows in zip(*repeats, strict=True)
    )


def options() -> argparse.ArgumentParser:
    made = parser_of_ranks(__doc__)
    made.add_argument("--rounds", type=int, default=30)
    return made


def main() -> int:
    asked = options().parse_args()
    report = Report("collective_ranks", asked)
    if asked.worker:
        run(report, asked)
        return 0
    report.print_machine()
    return launch(__file__, RANKS, asked, "--rounds", str(asked.rounds))


if __name__ == "__main__":
    sys.exit(main())
