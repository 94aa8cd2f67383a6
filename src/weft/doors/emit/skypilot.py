"""SkyPilot: a task that trains the plan with weft's own runtime, one `torchrun` per node."""

from __future__ import annotations

from textwrap import indent

from weft.doors.emit.base import Decided, Emitted, Loss, header
from weft.doors.emit.own_run import here_documents, losses_of, nodes_of, run_name, worker
from weft.errors import InputError, Violation
from weft.planning.planned_job import PlannedJob

NAME = "skypilot"
# Names other than the catalogue's in capitals.
_ACCELERATORS = {
    "p100-16gb": "P100",
    "v100-16gb": "V100",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "a100-40gb": "A100",
    "h100-80gb": "H100",
    "h200-141gb": "H200",
    "gh200-96gb": "GH200",
    "mi250x-64gb": "MI250X",
}
_FOLDER = '"$RUN_DIRECTORY"'


def emit(planned: PlannedJob) -> Emitted:
    """Return the task's YAML.

    Raises:
        InputError: when nodes are of several kinds, since all nodes of a task are alike.
    """
    decided = Decided(planned)
    nodes, losses = nodes_of(decided), losses_of(decided)
    if len(nodes) > 1:
        kinds = " and ".join(f"{one.count} of {one.devices} x {one.device.name}" for one in nodes)
        raise InputError(Violation("--emit", f"all nodes of a SkyPilot task are alike, not {kinds}", "slurm"))
    one = nodes[0]
    if one.count > 1 and decided.run.checkpoint.url is None:
        what = (
            "checkpoints, which each node keeps for its own ranks, as SkyPilot gives nodes no common folder"
        )
        losses.append(
            Loss(what, "a URL as checkpoint.directory, or RUN_DIRECTORY in a mounted volume or bucket")
        )
    file = f"{NAME}.yaml"
    launch = f"sky launch {file} --env WEFT=..."
    rank = '"$SKYPILOT_NODE_RANK"'
    command = worker(planned, one.count, one.devices, rank, '"$MASTER_ADDR"', _FOLDER)
    script = (
        "export MASTER_ADDR=\"${SKYPILOT_NODE_IPS%%$'\\n'*}\"\n"
        'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n'
        f"{here_documents(decided, _FOLDER)}"
        f"weft train {_FOLDER} --prepare-only\nfi\n"
        # The other nodes' workers start when this one's launcher answers, and find the directory prepared.
        f"{command}\n"
    )
    text = (
        f"{header(decided, launch, losses)}name: {run_name(decided)}\nnum_nodes: {one.count}\n"
        f"resources:\n  {_resources(one.device.name, one.devices, cpu=one.device.synchronous)}\n"
        f"envs:\n  RUN_DIRECTORY: runs/{run_name(decided)}\n"
        "  # What pip installs weft from, such as a folder with [torch]; SkyPilot asks for it.\n"
        "  WEFT: null\n"
        'setup: pip install "$WEFT"\n'
        f"run: |\n{indent(script, '  ')}"
    )
    return Emitted(file=file, text=text, launch=launch, losses=tuple(losses))


def _resources(device: str, count: int, *, cpu: bool) -> str:
    if cpu:
        return f"cpus: {count}+"
    return f"accelerators: {_ACCELERATORS.get(device, device.upper())}:{count}"
