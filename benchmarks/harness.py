"""What benchmarks share: repeated timings, and the machine and versions they were taken on."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("numpy", "numba", "torch")


def print_machine() -> None:
    """One line about the machine, one about the versions."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else platform.processor()
    print(f"machine: {name}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}")
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    print(f"versions: weft {version('weft')}, Python {platform.python_version()}, {versions}")


def median_s(call: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of `call`; the first call is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def report(what: str, seconds: float, target_s: float | None = None) -> None:
    """One line: the figure, and whether it is within its target."""
    verdict = (
        "" if target_s is None else f"  (target {target_s:g} s: {'met' if seconds <= target_s else 'MISSED'})"
    )
    print(f"{what:<64} {seconds * 1e3:>10.2f} ms{verdict}")
