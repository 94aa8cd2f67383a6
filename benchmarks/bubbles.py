"""How many steps the work of a second-order optimizer takes in the bubbles of pipelines, by ways to place it.

Blocks are those that the authors of PipeFisher measured on a P100. A row has the steps of a window and the
busy share with work, of the worst device. `cut in 4` has weft's own placement with inversions in four pieces.
Exact placements that the solver refuses as too large are left out. The idle shares are those of one step of
each order, with a backward pass twice as long as a forward one.

    python benchmarks/bubbles.py    # about a minute
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bubble_usage import filled_utilisation, least_steps, utilisation
from figures import Value
from harness import Report, parser
from published_blocks import BASE_8, BASE_32, LARGE_32, Block, pipeline, work, works

from weft.errors import InputError
from weft.methods.bubble_filling.checks import violations
from weft.methods.bubble_filling.placement.exact import exact
from weft.methods.bubble_filling.placement.greedy import greedy
from weft.methods.bubble_filling.placement.official import official
from weft.methods.bubble_filling.work import DeviceStep, Placer, WorkItem
from weft.predict.abstract import simulate_schedule

ROWS: tuple[tuple[str, Block, int], ...] = (
    ("base, 32", BASE_32, 4),
    ("large, 32", LARGE_32, 8),
    ("base, 8", BASE_8, 4),
)
SCHEDULES = ("gpipe", "1f1b", "chimera")
LARGE_DEVICES, LARGE_MICRO_BATCHES = 64, 512
TARGET_S = 2.0
IDLE = (
    ("gpipe", None),
    ("1f1b", None),
    ("breadth-first", 4),
    ("depth-first", 4),
    ("chimera", None),
    ("zb-h1", None),
    ("zb-v", 2),
)


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def worst(
    placer: Placer, steps: Sequence[DeviceStep], items: Sequence[Sequence[WorkItem]]
) -> tuple[int, float, float]:
    """The most steps, the smallest busy share and the most added seconds of all devices."""
    windows = [placer(step, of) for step, of in zip(steps, items, strict=True)]
    triples = list(zip(steps, items, windows, strict=True))
    assert not any(violations(*one) for one in triples)
    return (
        max(window.steps for window in windows),
        min(filled_utilisation(*one) for one in triples),
        max(window.added_s for window in windows),
    )


def measure_row(report: Report, name: str, block: Block, schedule: str, devices: int) -> None:
    if not report.missing(name):
        return
    steps = pipeline(block, schedule, devices, devices)
    items, cut = works(block, schedule, steps), works(block, schedule, steps, cuts=4)
    bound = max(least_steps(step, of) for step, of in zip(steps, items, strict=True))
    found = {
        "busy": Value(min(map(utilisation, steps)), "share"),
        "bound": Value(bound, "count"),
    }
    ways: dict[str, tuple[Placer, list[tuple[WorkItem, ...]]]] = {
        "official": (official, items),
        "weft": (greedy, items),
        "exact": (exact, items),
        "cut in 4": (greedy, cut),
    }
    for way, (placer, given) in ways.items():
        try:
            most, busy, added_s = worst(placer, steps, given)
        except InputError as error:
            report.say(f"{name}, {way}: {error}")
            continue
        found |= {way: Value(most, "count"), f"{way}, busy": Value(busy, "share")}
        if added_s:
            found[f"{way}, added"] = Value(added_s, "s")
    report.add_cell(name, found)


def measure_time(report: Report, schedule: str) -> None:
    name = f"weft, {schedule}, {LARGE_DEVICES} stages, {LARGE_MICRO_BATCHES} micro-batches"
    if not report.missing(name):
        return
    steps = pipeline(BASE_32, schedule, LARGE_DEVICES, LARGE_MICRO_BATCHES, blocks=1)
    items = [work(BASE_32, step, blocks=1) for step in steps]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for step, of in zip(steps, items, strict=True):
            greedy(step, of)
        seconds.append(time.perf_counter() - start)
    report.add(name, Value.of_repeats(seconds, "s", TARGET_S))


def measure_idle(report: Report, schedule: str, loops: int | None) -> None:
    name = f"idle share, {schedule}, 8 devices, 16 micro-batches"
    if report.missing(name):
        figures = simulate_schedule(schedule, devices=8, loops=loops, micro_batches=16)
        report.add(name, Value(figures.bubble_fraction, "share"))


def main() -> None:
    report = Report("bubbles", options().parse_args())
    report.print_machine()
    for name, block, devices in ROWS:
        for schedule in SCHEDULES:
            measure_row(report, f"{name}; {schedule}", block, schedule, devices)
    for schedule in SCHEDULES:
        measure_time(report, schedule)
    for schedule, loops in IDLE:
        measure_idle(report, schedule, loops)


if __name__ == "__main__":
    main()
