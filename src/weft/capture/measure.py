"""`measure`: the launch of the measuring workers and the files of their results. Never imports torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.capture.options import MICRO_BATCH_SIZES, require_degrees
from weft.describe.cluster import Cluster
from weft.describe.home import weft_home
from weft.describe.model import ModelConfig
from weft.describe.request import default_precision
from weft.describe.this_machine import this_machine
from weft.predict.cost.calibration import add_profile, profile_from_record, save_machine
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.run.launch.workers import launch_workers

WORKER_MODULE = "weft.capture.worker"


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements and the files that keep them; the file of the profile may have older rows, too."""

    machine: MachineMeasurement
    profile: LayerProfile | None
    files: tuple[Path, ...]


def measure(
    model: ModelConfig | None = None,
    *,
    precision: str | None = None,
    micro_batch_sizes: Sequence[int] = MICRO_BATCH_SIZES,
    tensor_degrees: Sequence[int] = (1,),
    home: Path | None = None,
) -> Measured:
    """Measure this machine's devices and links and, with a model, the times of its layers.

    Earlier rows of the layers at other tensor degrees are kept.

    Raises:
        InputError: for a tensor degree that does not divide the model's layers or this machine's ranks.
        RunError: when a measuring worker failed.
    """
    cluster = this_machine()
    if model is not None:
        require_degrees(cluster, model, tensor_degrees)
    home = home or weft_home()
    request = {
        "device": cluster.groups[0].device.name,
        "precision": precision or default_precision(cluster),
        "model": asdict(model) if model is not None else None,
        "micro_batch_sizes": list(micro_batch_sizes),
        "tensor_degrees": list(tensor_degrees),
    }
    answer = _ask_workers(cluster, request)
    machine = _machine_from(answer["machine"])
    files = [save_machine(machine, home)]
    profile = None
    if "profile" in answer:
        profile = profile_from_record(answer["profile"])
        files.append(add_profile(profile, home))
    return Measured(machine, profile, tuple(files))


def _ask_workers(cluster: Cluster, request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weft-measure-") as name:
        directory = Path(name)
        (directory / "measure.json").write_text(json.dumps(request))
        launch_workers(directory, cluster.ranks, WORKER_MODULE)
        answer: dict[str, Any] = json.loads((directory / "measured.json").read_text())
    return answer


def _machine_from(record: dict[str, Any]) -> MachineMeasurement:
    def table(rows: list[list[float]]) -> tuple[tuple[float, float], ...]:
        return tuple((float(size), float(value)) for size, value in rows)

    return MachineMeasurement(
        device=record["device"],
        matmul={name: table(rows) for name, rows in record["matmul"].items()},
        memory=table(record["memory"]),
        launch_s=record["launch_s"],
        instruction_s=record["instruction_s"],
        compute_slowdown=record["compute_slowdown"],
        communication_slowdown=record["communication_slowdown"],
        message=table(record["message"]),
        all_reduce=table(record["all_reduce"]),
        spread=record["spread"],
    )
