"""The worker of `weft measure`: every local rank measures at once, rank 0 writes the results.

The agent calls `main` on every rank; `DIRECTORY/measure.json` is the request.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from weft.capture.layers import profile_layers
from weft.capture.machine import measure_machine
from weft.describe.families import layer_graph
from weft.describe.model import model_from
from weft.describe.this_machine import this_machine
from weft.run.launch.worker_start import start_worker


def main(directory: Path) -> None:
    """Run the measurements that `measure.json` requests and write `measured.json`."""
    request = json.loads((directory / "measure.json").read_text())
    context = start_worker()
    device = torch.device(context.device)
    name, precision = request["device"], request["precision"]
    machine = measure_machine(this_machine(), device, precisions=(precision,))
    answer = {"machine": asdict(machine)}
    if request["model"] is not None:
        config = model_from(request["model"])
        profile = profile_layers(
            config,
            layer_graph(config),
            name,
            device,
            precision=precision,
            micro_batch_sizes=request["micro_batch_sizes"],
            tensor_degrees=request["tensor_degrees"],
        )
        answer["profile"] = asdict(profile)
    if context.rank == 0:
        (directory / "measured.json").write_text(json.dumps(answer))
    context.close()
