"""The worker of `weft measure`: every local rank measures at once, rank 0 writes the results.

The agent calls `main` on every rank; `DIRECTORY/measure.json` is the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from weft.capture.layers import profile_layers
from weft.capture.machine import measure_machine
from weft.describe.families import layer_graph
from weft.describe.model import model_from
from weft.describe.this_machine import this_machine
from weft.predict.profile import LayerProfile
from weft.progress import ProgressReport, progress_file, unwatched
from weft.run.launch.worker_start import start_worker


def main(directory: Path) -> None:
    """Run the measurements that `measure.json` requests and write `measured.json`."""
    request = json.loads((directory / "measure.json").read_text())
    context = start_worker()
    device = torch.device(context.device)
    report = progress_file(directory).write if context.rank == 0 else unwatched
    machine = measure_machine(this_machine(), device, precisions=(request["precision"],), report=report)
    answer = {"machine": asdict(machine)}
    if request["model"] is not None:
        answer["profile"] = asdict(requested_profile(request, request["device"], device, report))
    if context.rank == 0:
        (directory / "measured.json").write_text(json.dumps(answer))
    context.close()


def requested_profile(
    request: Mapping[str, Any],
    name: str,
    device: torch.device,
    report: ProgressReport,
    *,
    throttled: bool = False,
) -> LayerProfile:
    """Profile the layers of the requested model on this rank's device, which is called `name`."""
    config = model_from(request["model"])
    asked = {key: request[key] for key in ("precision", "micro_batch_sizes", "tensor_degrees")}
    graph = layer_graph(config)
    return profile_layers(config, graph, name, device, **asked, throttled=throttled, report=report)
