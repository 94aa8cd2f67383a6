"""The worker of `benchmarks/server_sums.py`: one rank inside a lab, a replica or a server of one plan."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from lab_plans_worker import trained_s
from server_sums import model

from weft.run.launch.worker_start import start_worker


def main(folder: Path) -> None:
    """Train the plan; rank 0 writes the seconds of its steps."""
    context = start_worker()
    seconds = trained_s(folder / "plan.json", 0, model())
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(seconds))
    context.close()
