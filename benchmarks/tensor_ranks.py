"""Steps of plans with two tensor ranks: predicted from three levels of knowledge, then measured.

From data sheets, from this machine's measured speeds, and from its layers as two tensor ranks run them. It
needs two ranks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from harness import print_machine

import weft
from weft.capture.measure import measure
from weft.describe.models import resolve_model

MODELS, SEQUENCE, GLOBAL_BATCH, STEPS = ("gpt-1m", "llama-1m"), 256, 16, 24
MICRO_BATCH_SIZES = (2, 4, 8)


def planned(model: str, micro_batch_size: int, home: Path) -> weft.Planned:
    """The plan that a home's measurements predict."""
    os.environ["WEFT_HOME"] = str(home)
    pins = {"pp": 1, "dp": 1, "tp": 2, "micro_batch_size": micro_batch_size, "sharding": "zero-0"}
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


def main() -> None:
    print_machine()
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="weft-tensor-ranks-") as name:
            folder = Path(name)
            homes = homes_of(model, folder)
            for size in MICRO_BATCH_SIZES:
                plans = {level: planned(model, size, home) for level, home in homes.items()}
                run = weft.train(
                    plans["layers"], data="python-stdlib", steps=STEPS, directory=folder / f"run-{size}"
                )
                measured_s = run.summary["measured_step_s"]
                predicted = {level: plan.job.predicted.prediction.step_s for level, plan in plans.items()}
                shown = "  ".join(
                    f"{level} {seconds * 1e3:5.0f} ms ({seconds / measured_s - 1:+.0%})"
                    for level, seconds in predicted.items()
                )
                print(
                    f"{model}, micro-batch size {size}: measured {measured_s * 1e3:5.0f} ms  {shown}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
