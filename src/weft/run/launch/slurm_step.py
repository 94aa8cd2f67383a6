"""The variables of `torchrun` for the tasks of a Slurm step, which `srun` starts without it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.describe.inventory.slurm import expanded

_PORTS = range(29500, 30500)


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and the others from the variables of a Slurm step; empty outside of steps.

    The first node of the step is the address, and the job's number chooses the port. Variables that are set
    already are kept.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return {}
    tasks = environment["SLURM_STEP_TASKS_PER_NODE"]  # 4(x2),3
    first = re.match(r"\d+", tasks.split(",")[_place(tasks, int(environment["SLURM_NODEID"]))])
    assert first is not None, f"Slurm counts tasks: {tasks}"
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": first[0],
        "MASTER_ADDR": next(expanded(environment["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": str(_PORTS[int(environment.get("SLURM_JOB_ID", "0")) % len(_PORTS)]),
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def _place(tasks: str, node: int) -> int:
    """Return which of the counts, each of one or several nodes in order, is of a node."""
    for place, count in enumerate(tasks.split(",")):
        repeated = re.search(r"\(x(\d+)\)", count)
        node -= int(repeated[1]) if repeated else 1
        if node < 0:
            return place
    return 0
