"""An autoencoder of digits, trained with K-FAC in the bubbles of a pipeline, beside first-order optimizers.

python digits.py [--quick] [--json FILE]

Each step sees all 1,792 digits, and work of K-FAC comes once in three steps. Every arm has a learning rate of
its own, and K-FAC a damping. They are the best of a grid on seeds that are not reported, in one process with
fresh inverses every three steps. Finalists also run as real pipelines of 2 and 4 ranks, with the windows of
three steps that `weft plan` finds. Rates rise for ten steps and fall linearly to zero.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from autoencoder import SAMPLES
from studies import Effort, Grid, Study, as_json, report
from trainings import Arm, Job

MODEL = "autoencoder:build"
EVERY, MICRO_BATCH = 3, 224
# Devices so slow that three steps of one pipeline hold all work; no schedule depends on more than ratios.
CLUSTER = """
[[node]]
name = "box"
count = 1
device = "core"
devices = 4
bandwidth = "10 GB/s"
latency = "5 us"
[device.core]
memory = "4 GB"
memory_bandwidth = "20 GB/s"
flops = { fp32 = "5 GFLOP/s" }
launch = "5 us"
"""


FULL = Effort(200, 2, 5, 4, (2, 4), 2)
QUICK = Effort(12, 1, 1, 0, (2,), 1)
GRIDS = (
    Grid(Arm("adamw", 0.0), (3e-3, 9e-3, 2.7e-2)),
    Grid(Arm("lamb", 0.0), (3e-3, 9e-3, 2.7e-2)),
    Grid(Arm("nvlamb", 0.0), (3e-3, 9e-3, 2.7e-2)),
    Grid(Arm("sgd", 0.0), (3e-4, 9e-4, 2.7e-3), (3e-5, 9e-5, 2.7e-4)),
    Grid(Arm("lamb", 0.0), (3e-3, 9e-3, 2.7e-2), (3e-4, 9e-4, 2.7e-3)),
    Grid(Arm("nvlamb", 0.0), (9e-3, 2.7e-2, 8.1e-2), (3e-4, 9e-4, 2.7e-3)),
)
QUICK_GRIDS = (
    Grid(Arm("adamw", 0.0), (9e-3,)),
    Grid(Arm("nvlamb", 0.0), (9e-3,)),
    Grid(Arm("nvlamb", 0.0), (9e-3,), (9e-4,)),
)


def study_in(folder: Path) -> Study:
    cluster = folder / "cluster.toml"
    cluster.write_text(CLUSTER)
    job = Job(MODEL, "autoencoder:Digits", str(folder))
    return Study(job, {"model": {"build": MODEL}}, SAMPLES, MICRO_BATCH, EVERY, cluster)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of few arms, untuned")
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = study_in(Path(folder))
        found = study.run(QUICK_GRIDS, QUICK) if given.quick else study.run(GRIDS, FULL)
    print(*report(found, ("nvlamb", "adamw")), sep="\n")
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(found)))


if __name__ == "__main__":
    main()
