"""Predicted against measured step times of several plans of one model on this machine.

Measures the machine and the model's layers, then trains every plan for a few dozen steps in fresh processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figures import Value
from harness import Report, parser

import weft
from weft.capture.measure import measure
from weft.describe.models import resolve_model

MODEL, SEQUENCE, GLOBAL_BATCH, STEPS = "gpt-1m", 256, 16, 40
PLANS = (
    {"pp": 1, "dp": 2, "micro_batch_size": 2},
    {"pp": 2, "dp": 1, "schedule": "gpipe", "micro_batch_size": 2},
    {"pp": 2, "dp": 1, "schedule": "1f1b", "micro_batch_size": 2},
    {"pp": 2, "dp": 1, "schedule": "1f1b", "micro_batch_size": 4},
    {"pp": 2, "dp": 1, "schedule": "breadth-first", "loops": 2, "micro_batch_size": 1},
    {"pp": 2, "dp": 1, "schedule": "breadth-first", "loops": 2, "micro_batch_size": 4},
)


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("prediction", options().parse_args())
    report.print_machine()
    cells = {", ".join(f"{key} {value}" for key, value in pins.items()): pins for pins in PLANS}
    left = {cell: pins for cell, pins in cells.items() if report.missing(cell)}
    with tempfile.TemporaryDirectory(prefix="weft-prediction-") as name:
        folder = Path(name)
        os.environ["WEFT_HOME"] = str(folder / "home")
        if left:
            measure(resolve_model(MODEL, sequence=SEQUENCE))
        for number, (cell, pins) in enumerate(left.items()):
            report.add_cell(cell, trained(pins, folder / str(number)))
    errors = [abs(report.value(f"{cell}: error")) for cell in cells]
    report.add("mean absolute error", Value(statistics.mean(errors), "share"))
    report.add("worst absolute error", Value(max(errors), "share"))


def trained(pins: Mapping[str, Any], directory: Path) -> dict[str, Value]:
    """The step of one plan, predicted and measured."""
    plan = weft.plan(model=MODEL, on="this-machine", global_batch=GLOBAL_BATCH, sequence=SEQUENCE, **pins)
    run = weft.train(plan, data="python-stdlib", steps=STEPS, directory=directory)
    predicted, measured = run.summary["predicted_step_s"], run.summary["measured_step_s"]
    return {
        "predicted": Value(predicted, "s"),
        "measured": Value(measured, "s"),
        "error": Value(predicted / measured - 1.0, "share"),
    }


if __name__ == "__main__":
    main()
