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

MODELS, SEQUENCE, GLOBAL_BATCH, STEPS = ("gpt-1m", "llama-1m"), 256, 16, 40
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
    cells = {
        ", ".join([model, *(f"{key} {value}" for key, value in pins.items())]): (model, pins)
        for model in MODELS
        for pins in PLANS
    }
    left = {cell: asked for cell, asked in cells.items() if report.missing(cell)}
    with tempfile.TemporaryDirectory(prefix="weft-prediction-") as name:
        folder = Path(name)
        os.environ["WEFT_HOME"] = str(folder / "home")
        for model in dict.fromkeys(model for model, _ in left.values()):
            measure(resolve_model(model, sequence=SEQUENCE))
        for number, (cell, (model, pins)) in enumerate(left.items()):
            report.add_cell(cell, trained(model, pins, folder / str(number)))
    errors, insides, widths = (
        [report.value(f"{cell}: {figure}") for cell in cells]
        for figure in ("error", "inside the interval", "half-width")
    )
    report.add("mean absolute error", Value(statistics.mean(map(abs, errors)), "share"))
    report.add("worst absolute error", Value(max(map(abs, errors)), "share"))
    report.add("steps inside their intervals", Value(statistics.mean(insides), "share"))
    report.add("median half-width", Value(statistics.median(widths), "share", target=0.12))


def trained(model: str, pins: Mapping[str, Any], directory: Path) -> dict[str, Value]:
    """The step of one plan, predicted and measured, and its predicted interval."""
    plan = weft.plan(model=model, on="this-machine", global_batch=GLOBAL_BATCH, sequence=SEQUENCE, **pins)
    run = weft.train(plan, data="python-stdlib", steps=STEPS, directory=directory)
    predicted, measured = run.summary["predicted_step_s"], run.summary["measured_step_s"]
    interval = plan.job.prediction
    return {
        "predicted": Value(predicted, "s", low=interval.step_low_s, high=interval.step_high_s),
        "measured": Value(measured, "s"),
        "error": Value(predicted / measured - 1.0, "share"),
        "inside the interval": Value(float(interval.step_low_s <= measured <= interval.step_high_s), "share"),
        "half-width": Value(interval.step_high_s / predicted - 1.0, "share"),
    }


if __name__ == "__main__":
    main()
