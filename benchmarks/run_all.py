"""Run every benchmark of this folder, one after the other, each in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "start_up",
    "programs",
    "simulator",
    "planners",
    "peers",
    "recorder",
    "prediction",
    "tensor_ranks",
    "tensor_collectives",
    "sleep_compute",
    "slow_link",
    "lab_plans",
    "executor_vs_torch",
    "replicas_vs_torch",
    "taps",
    "equality_matrix",
    "restore_matrix",
    "kill_matrix",
    "doors_in_stacks",
)


def main() -> int:
    folder = Path(__file__).parent
    failed = []
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, str(folder / f"{name}.py")], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
