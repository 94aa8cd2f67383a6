"""How long a user waits for a plan: processor seconds to the first plan that fits, and to the best one.

    python benchmarks/first_answer.py

Each job is planned in fresh processes. Seconds are those of the processor, with the import of weft's rooms
and without the start of Python and the import of numpy. So other work on the machine does not stretch them. A
terminal shows the first plan while the search goes on; its step stands beside the best one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from figures import Value
from harness import Report, parser

REPEATS = 3
# Seconds of the processor to a first answer.
TARGET_S = 1.0
JOBS: dict[str, dict[str, Any]] = {
    "gpt-10m on 8 A100": {"model": "gpt-10m", "on": "8xa100-80gb"},
    "llama-7b on 64 A100": {"model": "llama-7b", "on": "64xa100-80gb"},
    "llama-3-70b on 256 H100": {"model": "llama-3-70b", "on": "256xh100-80gb"},
    "mixtral-8x7b on 64 H100": {"model": "mixtral-8x7b", "on": "64xh100-80gb"},
    "llama-3-405b on 512 H100": {"model": "llama-3-405b", "on": "512xh100-80gb"},
    "llama-3-405b on 1024 H100": {"model": "llama-3-405b", "on": "1024xh100-80gb"},
    "gpt2 on 8 A100 and 8 T4": {"model": "gpt2", "on": "8xa100-80gb+8xt4"},
}


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    return made


def main() -> None:
    asked = options().parse_args()
    if asked.job:
        print(json.dumps(planned(**JOBS[asked.job])))
        return
    report = Report("first_answer", asked)
    report.print_machine()
    for name in JOBS:
        if report.missing(name):
            report.add_cell(name, figures(name))


def figures(name: str) -> dict[str, Value]:
    """Return medians over fresh processes."""
    command = [sys.executable, __file__, "--job", name]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(REPEATS)
    ]
    first_s, best_s = (statistics.median(one[key] for one in found) for key in ("first_s", "best_s"))
    return {
        "imports": Value(statistics.median(one["imported_s"] for one in found), "s"),
        "first plan": Value(first_s, "s", TARGET_S),
        "best plan": Value(best_s, "s"),
        "first step over the best": Value(found[0]["first_step"], "ratio"),
    }


def planned(model: str, on: str) -> dict[str, float]:
    """In a process of its own: plan a job, and note when it tells its first plan."""
    import numpy  # noqa: F401  # its import does not count

    start_s = time.process_time()
    from weft.describe.run_file import run_of_keywords
    from weft.describe.units import parse_seconds
    from weft.planning.planned import plan_run
    from weft.planning.planners.weft import WeftPlanner

    imported_s = time.process_time() - start_s
    told: list[tuple[float, str]] = []
    planner = WeftPlanner(tell=lambda text: told.append((time.process_time() - start_s, text)))
    run = run_of_keywords(model=model, on=on, global_batch=None, sequence=None, precision=None, pins={})
    job = plan_run(run, planner=planner)
    best_s = time.process_time() - start_s
    first_s, text = told[0]
    step = text.removeprefix("best so far: ").split(",")[0]
    return {
        "imported_s": imported_s,
        "first_s": first_s,
        "best_s": best_s,
        "first_step": parse_seconds(step) / job.prediction.step_s,
    }


if __name__ == "__main__":
    main()
