"""Slurm: a batch script that trains the plan with weft's own runtime, one `torchrun` per node."""

from __future__ import annotations

from weft.doors.emit.base import Decided, Emitted, header
from weft.doors.emit.own_run import (
    Nodes,
    here_documents,
    losses_of,
    nodes_of,
    run_name,
    worker,
)
from weft.planning.elastic import node_limits
from weft.planning.planned_job import PlannedJob

NAME = "slurm"
_FOLDER = '"$RUN_DIRECTORY"'


def emit(planned: PlannedJob) -> Emitted:
    """Return the script; nodes of several kinds become the components of a heterogeneous job."""
    decided = Decided(planned)
    nodes, losses = nodes_of(decided), losses_of(decided, "--constraint or --partition in each request")
    file = f"{NAME}.sh"
    launch = f"sbatch {file}"
    limits = node_limits(planned)
    least = min(limits.planned, nodes[0].count) if limits.elastic else None
    components = "#SBATCH hetjob\n".join(_requests(one, least) for one in nodes)
    if limits.elastic:
        # Else the job ends with the first node that it loses.
        components += "#SBATCH --no-kill\n"
        options, folders = "--no-kill --kill-on-bad-exit=0 ", "All nodes must see the run directory."
        # The task of a lost node has failed, also if the others have finished the run.
        ended = f" || [ {_FOLDER}/result.json -nt {_FOLDER}/plan.json ]"
    else:
        options = ended = ""
        folders = (
            "Nodes that do not share the run directory make their own, and keep their checkpoints there."
        )
    text = (
        f"#!/usr/bin/env bash\n#SBATCH --job-name={run_name(decided)}\n{components}"
        f"{header(decided, launch, losses)}"
        f"# {folders}\n"
        f"set -euo pipefail\n"
        f'export RUN_DIRECTORY="${{RUN_DIRECTORY:-$SLURM_SUBMIT_DIR/runs/{run_name(decided)}}}"\n'
        f"{here_documents(decided, _FOLDER)}"
        f"weft train {_FOLDER} --prepare-only\n"
        f"{_start(planned, nodes, options)}{ended}\n"
        f"weft compare {_FOLDER}\n"
    )
    return Emitted(file=file, text=text, launch=launch, losses=tuple(losses))


def _requests(nodes: Nodes, least: int | None) -> str:
    """Return the request of one task per node with the node's processors for all of its ranks.

    The job begins with `least` nodes if that many are free.
    """
    count = str(nodes.count) if least in (None, nodes.count) else f"{least}-{nodes.count}"
    lines = f"#SBATCH --nodes={count}\n#SBATCH --ntasks-per-node=1\n"
    if nodes.device.synchronous:
        return f"{lines}#SBATCH --cpus-per-task={nodes.devices}\n"
    # By default a task has one processor.
    processors = "--exclusive" if nodes.whole else f"--cpus-per-task={nodes.devices}"
    return f"{lines}#SBATCH --gpus-per-node={nodes.devices}\n#SBATCH {processors}\n"


def _start(job: PlannedJob, nodes: list[Nodes], options: str) -> str:
    """Return the start of one task per node for its ranks; tasks have the plan's node numbers."""
    count = sum(one.count for one in nodes)
    several = len(nodes) > 1
    hosts = "$SLURM_JOB_NODELIST_HET_GROUP_0" if several else "$SLURM_JOB_NODELIST"
    steps = []
    for number, one in enumerate(nodes):
        where = ('"$SLURM_PROCID"', '"$MASTER_ADDR"', _FOLDER, '"$MASTER_PORT"')
        command = worker(job, count, one.devices, *where)
        group = f"--het-group={number} " if several else ""
        # Since 22.05 a step does not inherit the processors of the job's tasks.
        processors = f"--cpus-per-task={one.devices} " if one.device.synchronous or not one.whole else ""
        steps.append(f"{group}{processors}bash -c '{command}'")
    return (
        f'HOSTS="$(scontrol show hostnames "{hosts}")"\n'
        # A pipe into head could end before its writer does, and so end the script.
        "export MASTER_ADDR=\"${HOSTS%%$'\\n'*}\"\n"
        # Jobs may share a node, and each needs a port; Linux gives those from 32768 on to connections.
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))\n"
        f"srun {options}{' : '.join(steps)}"
    )
