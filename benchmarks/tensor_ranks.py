"""Steps of plans with two tensor ranks: predicted from three levels of knowledge, then measured.

From data sheets, from this machine's measured speeds, and from its layers as two tensor ranks run them. It
needs two ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figures import Value
from harness import Report, parser

import weft
from weft.capture.measure import measure
from weft.describe.models import resolve_model

MODELS, SEQUENCE, GLOBAL_BATCH, STEPS = ("gpt-1m", "llama-1m"), 256, 16, 24
MICRO_BATCH_SIZES = (2, 4, 8)


def planned(model: str, micro_batch_size: int, home: Path) -> weft.Planned:
    """The plan that a home's measurements predict."""
    os.environ["WEFT_HOME"] = str(home)
    pins: dict[str, Any] = {
        "pp": 1,
        "dp": 1,
        "tp": 2,
        "micro_batch_size": micro_batch_size,
        "sharding": "zero-0",
    }
    return weft.plan(model=model, on="this-machine", global_batch=GLOBAL_BATCH, sequence=SEQUENCE, **pins)


def homes_of(model: str, folder: Path) -> dict[str, Path]:
    """By level of knowledge, a home that has the measurements of it."""
    homes = {name: folder / name for name in ("data sheet", "machine", "layers")}
    config = resolve_model(model, sequence=SEQUENCE)
    found = measure(config, tensor_degrees=(1, 2), micro_batch_sizes=MICRO_BATCH_SIZES, home=homes["layers"])
    machine = found.files[0]
    copy = homes["machine"] / machine.relative_to(homes["layers"])
    copy.parent.mkdir(parents=True)
    shutil.copy(machine, copy)
    return homes


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("tensor_ranks", options().parse_args())
    report.print_machine()
    for model in MODELS:
        cells = {f"{model}, micro-batch size {size}": size for size in MICRO_BATCH_SIZES}
        left = {cell: size for cell, size in cells.items() if report.missing(cell)}
        if not left:
            continue
        with tempfile.TemporaryDirectory(prefix="weft-tensor-ranks-") as name:
            folder = Path(name)
            homes = homes_of(model, folder)
            for cell, size in left.items():
                plans = {level: planned(model, size, home) for level, home in homes.items()}
                report.add_cell(cell, trained(plans, folder / f"run-{size}"))


def trained(plans: Mapping[str, weft.Planned], directory: Path) -> dict[str, Value]:
    """The measured step, and by level of knowledge the error of the predicted one."""
    run = weft.train(plans["layers"], data="python-stdlib", steps=STEPS, directory=directory)
    measured_s = run.summary["measured_step_s"]
    errors = {
        f"error from {level}": Value(plan.job.predicted.prediction.step_s / measured_s - 1.0, "share")
        for level, plan in plans.items()
    }
    return {"measured": Value(measured_s, "s"), **errors}


if __name__ == "__main__":
    main()
