"""Predicted against measured step times of several plans of one model on this machine.

Measures the machine and the model's layers, then trains every plan for a few dozen steps in fresh processes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from harness import print_machine

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


def main() -> None:
    print_machine()
    with tempfile.TemporaryDirectory(prefix="weft-prediction-") as name:
        folder = Path(name)
        os.environ["WEFT_HOME"] = str(folder / "home")
        measure(resolve_model(MODEL, sequence=SEQUENCE))
        errors = []
        for number, pins in enumerate(PLANS):
            plan = weft.plan(
                model=MODEL, on="this-machine", global_batch=GLOBAL_BATCH, sequence=SEQUENCE, **pins
            )
            run = weft.train(plan, data="python-stdlib", steps=STEPS, directory=folder / str(number))
            predicted, measured = run.summary["predicted_step_s"], run.summary["measured_step_s"]
            errors.append(predicted / measured - 1.0)
            words = ", ".join(f"{key} {value}" for key, value in pins.items())
            print(
                f"{words:<66} predicted {predicted * 1e3:7.1f} ms  measured {measured * 1e3:7.1f} ms  "
                f"{errors[-1]:+.1%}",
                flush=True,
            )
    mean = statistics.mean(abs(error) for error in errors)
    print(f"mean absolute error {mean:.1%}, worst {max(errors, key=abs):+.1%}")


if __name__ == "__main__":
    main()
