"""The worker that measures collectives among the numbers of ranks that the user asks for.

The agent calls `main` on as many ranks as the largest number; `DIRECTORY/measure.json` is the request.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from weft.capture.collectives import measure_collectives
from weft.capture.machine import sizes_on
from weft.predict.profile import COLLECTIVES
from weft.progress import CountedWork, progress_file, unwatched
from weft.run.launch.worker_start import start_worker


def main(directory: Path) -> None:
    """Run the measurements that `measure.json` requests; rank 0 writes `measured.json`."""
    counts = json.loads((directory / "measure.json").read_text())["ranks"]
    context = start_worker()
    device = torch.device(context.device)
    sizes = sizes_on(device).reduce
    report = progress_file(directory).write if context.rank == 0 else unwatched
    counted = CountedWork(report, "collectives", len(counts) * len(COLLECTIVES) * len(sizes), "parts")
    found = measure_collectives(counts, device, sizes, counted.each)
    if context.rank == 0:
        (directory / "measured.json").write_text(json.dumps(found))
    context.close()
