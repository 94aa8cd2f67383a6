"""`measure`: the launch of the measuring workers and the files of their results. Never imports torch."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.families.captured import FAMILY as CAPTURED
from weft.describe.model import ModelConfig
from weft.describe.request import default_precision, require_precision
from weft.describe.this_machine import this_machine
from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.predict.cost.calibration import add_profile, profile_from_record, save_machine
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.progress import ProgressReport, progress_file, unwatched
from weft.run.launch.workers import launch_workers

# Each rank is a process with torch in it.
MOST_ON_CORE = 16
MICRO_BATCH_SIZES = (1, 2, 4, 8)
DEGREES_OPTION = "--tensor-parallel"
RANKS_OPTION = "--ranks"
WORKER_MODULE = "weft.capture.worker"
COLLECTIVES_MODULE = "weft.capture.collectives_worker"


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
    ranks: Sequence[int] = (),
    home: Path | None = None,
    report: ProgressReport = unwatched,
) -> Measured:
    """Measure this machine's devices and links and, with a model, the times of its layers.

    Earlier rows of the layers at other tensor degrees are kept.

    Args:
        ranks: the numbers of ranks to measure collectives among, rising; empty: powers of two up to all.

    Raises:
        InputError: for a tensor degree that does not divide the model's layers or this machine's ranks; for
            fewer than two ranks, or more of them than accelerators.
        RunError: when a measuring worker failed.
    """
    cluster, home = this_machine(), home or weft_home()
    request = request_of(cluster, model, precision, micro_batch_sizes, tensor_degrees)
    request["device"] = cluster.groups[0].device.name
    require_ranks(cluster, ranks)
    with answered(WORKER_MODULE, cluster.ranks, request, report) as directory:
        answer = json.loads((directory / "measured.json").read_text())
    if ranks:
        with answered(COLLECTIVES_MODULE, ranks[-1], {"ranks": list(ranks)}, report) as directory:
            answer["machine"]["collectives"] = json.loads((directory / "measured.json").read_text())
    machine = TypeAdapter(MachineMeasurement).validate_python(answer["machine"])
    files = [save_machine(machine, home)]
    profile = None
    if "profile" in answer:
        profile = profile_from_record(answer["profile"])
        files.append(add_profile(profile, home))
    return Measured(machine, profile, tuple(files))


def request_of(
    cluster: Cluster,
    model: ModelConfig | None,
    precision: str | None,
    micro_batch_sizes: Sequence[int],
    tensor_degrees: Sequence[int],
) -> dict[str, Any]:
    """Return a request to measuring workers, for JSON.

    Raises:
        InputError: for a tensor degree that does not divide the model's layers or the devices of every node,
            for a precision that a device does not compute, and for a model without code.
    """
    if precision is not None:
        require_precision(cluster, precision)
    if model is not None:
        if model.family == CAPTURED:
            problem = f"{model.name!r}: a file of layers has no code to measure"
            raise InputError(Violation("model", problem, "package.module:function"))
        require_degrees(cluster, model, tensor_degrees)
    return {
        "precision": precision or default_precision(cluster),
        "model": asdict(model) if model is not None else None,
        "micro_batch_sizes": list(micro_batch_sizes),
        "tensor_degrees": list(tensor_degrees),
    }


@contextmanager
def answered(worker: str, ranks: int, request: dict[str, Any], report: ProgressReport) -> Iterator[Path]:
    """Yield the folder with the answers of all ranks, each of which has run the module `worker`."""
    with tempfile.TemporaryDirectory(prefix="weft-measure-") as name:
        directory = Path(name)
        (directory / "measure.json").write_text(json.dumps(request))
        with progress_file(directory).polled(report) as poll:
            launch_workers(directory, ranks, worker, poll)
        yield directory


def counts_of(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers of at least 1, separated by commas; return each once, ascending.

    Raises:
        InputError: with the option and every wrong word.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not (word.isascii() and word.isdigit() and int(word) > 0)]
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise InputError(Violation(option, f"{named}, allowed: whole numbers of at least 1", "1,2,4"))
    return tuple(sorted({int(word) for word in words}))


def require_ranks(cluster: Cluster, ranks: Sequence[int]) -> None:
    """Check that collectives can be measured among so many ranks; cores may be shared.

    Raises:
        InputError: for fewer than two ranks, more of them than accelerators, or very many for each core.
    """
    if ranks and ranks[0] < 2:
        raise InputError(Violation(RANKS_OPTION, "a collective has two ranks or more", "2"))
    if ranks and ranks[-1] > cluster.ranks and not cluster.groups[0].device.synchronous:
        problem = f"{ranks[-1]} ranks need as many devices; {cluster.name} has {cluster.ranks}"
        raise InputError(Violation(RANKS_OPTION, problem, str(cluster.ranks)))
    most = MOST_ON_CORE * cluster.ranks
    if ranks and ranks[-1] > most:
        problem = f"{ranks[-1]} ranks are more than {MOST_ON_CORE} for each core"
        raise InputError(Violation(RANKS_OPTION, problem, str(most)))


def require_degrees(cluster: Cluster, model: ModelConfig, degrees: Sequence[int]) -> None:
    """Check that all tensor degrees divide the model's layers and the devices of every node.

    Raises:
        InputError: with a violation for each wrong degree.
    """
    graph = layer_graph(model)
    devices = set(Counter(cluster.node_of(rank) for rank in range(cluster.ranks)).values())
    problems = []
    for degree in degrees:
        odd = sorted(count for count in devices if count % degree)
        if (reason := graph.refuse_tensor(degree)) is not None:
            problems.append(Violation(DEGREES_OPTION, reason))
        elif odd:
            near = max(
                one
                for one in range(1, degree)
                if graph.refuse_tensor(one) is None and not any(count % one for count in devices)
            )
            problem = f"{degree} does not divide the {odd[0]} devices of a node of {cluster.name}"
            problems.append(Violation(DEGREES_OPTION, problem, str(near)))
    if problems:
        raise InputError(problems)
