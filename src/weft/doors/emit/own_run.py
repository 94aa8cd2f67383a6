"""The common parts of launchers of weft's own runs: the run directory's files, and one command per node.

A run directory needs `run.toml` and `plan.json`; `weft train DIRECTORY --prepare-only` makes the rest of it.
`torchrun -m weft.training.worker DIRECTORY` on every node joins the ranks. Nodes that do not see the first
one's directory take copies of its files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from hashlib import sha256

from weft.describe.device import Device
from weft.describe.plan_file import PlanFile
from weft.describe.run_file import RUN_ID
from weft.describe.tasks import sources_of
from weft.doors.emit.base import Decided, Loss
from weft.errors import InputError
from weft.planning.elastic import node_limits, refused_limits
from weft.planning.planned_job import PlannedJob

PORT = 29500
WORKER = "-m weft.training.worker"


@dataclass(frozen=True, slots=True)
class Nodes:
    """`count` nodes with the next ranks, `devices` on each; `first` is the first one's number.

    `whole`: the ranks need all devices of the nodes.
    """

    device: Device
    count: int
    devices: int
    first: int
    whole: bool = True


def nodes_of(decided: Decided) -> list[Nodes]:
    """Return the nodes of the plan's ranks, in the order of the ranks; a partly used node is separate.

    An elastic run has the most nodes that it takes in.

    Raises:
        InputError: if it is elastic and cannot be.
    """
    if problems := refused_limits(decided.job):
        raise InputError(problems)
    limits = node_limits(decided.job)
    if limits.elastic:
        (group,) = decided.job.problem.job.cluster.groups
        return [Nodes(group.device, limits.most, group.devices, 0)]
    found: list[Nodes] = []
    left, first = decided.plan.ranks, 0
    for group in decided.job.problem.job.cluster.groups:
        whole = min(group.count, left // group.devices)
        rest = min(left - whole * group.devices, group.devices if whole < group.count else 0)
        for count, devices in ((whole, group.devices), (1, rest)):
            if not count or not devices:
                continue
            nodes = Nodes(group.device, count, devices, first, whole=devices == group.devices)
            if found and replace(found[-1], count=count, first=first) == nodes:
                found[-1] = replace(found[-1], count=found[-1].count + count)
            else:
                found.append(nodes)
            first += count
            left -= count * devices
    return found


def files(decided: Decided) -> dict[str, str]:
    """Return `run.toml` and `plan.json`, the sources of a run directory.

    With checkpoints behind a URL, the run's name there comes along. So whoever starts the same file anew, on
    nodes that have nothing, goes on from the newest one.
    """
    # The plan is predicted where the run is prepared.
    subject = decided.job.problem.subject(decided.run).pinned(decided.plan)
    file = PlanFile(decided.plan, subject=subject)
    found = {"run.toml": subject.run.to_toml(), "plan.json": file.to_json()}
    if subject.run.checkpoint.url is None:
        return found
    return {**found, RUN_ID: f"{sha256(''.join(found.values()).encode()).hexdigest()[:32]}\n"}


def here_documents(decided: Decided, folder: str) -> str:
    """Return shell code that writes the files into `folder`, unless a run has begun there."""
    writes = "".join(
        f"cat > {folder}/{name} <<'END_OF_{name.partition('.')[0].upper()}'\n{text.rstrip()}\n"
        f"END_OF_{name.partition('.')[0].upper()}\n"
        for name, text in files(decided).items()
    )
    return f"mkdir -p {folder}\nif [ ! -e {folder}/plan.json ]; then\n{writes}fi\n"


def worker(
    job: PlannedJob, nodes: int, devices: int, rank: str, master: str, folder: str, port: str = str(PORT)
) -> str:
    """Return the command that runs one node's ranks of a job; the words after `devices` are for a shell."""
    limits = node_limits(job)
    if limits.elastic:
        # Only such a meeting takes nodes that come later. It gives the ranks itself. With a store that agents
        # share, such a node would wait forever (torch 2.13).
        where = f" --rdzv-backend c10d --rdzv-id {run_name(Decided(job))} --rdzv-endpoint {master}:{port}"
        command = _torchrun(job, f"--nnodes {limits.least}:{limits.most} ", devices, folder, where)
        return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {command}"
    if nodes == 1:
        return _torchrun(job, "--standalone ", devices, folder)
    where = f" --node-rank {rank} --master-addr {master} --master-port {port}"
    return _torchrun(job, f"--nnodes {nodes} ", devices, folder, where)


def _torchrun(job: PlannedJob, first: str, devices: int, folder: str, last: str = "") -> str:
    """Return a command of torchrun, which starts ranks again as often as the job's run file says."""
    again = f" --max-restarts {restarts}" if (restarts := job.run.run.max_restarts) else ""
    return f"torchrun {first}--nproc-per-node {devices}{again}{last} {WORKER} {folder}"


def start_commands(job: PlannedJob, folder: str) -> list[str]:
    """Return the command of torchrun for each kind of node; its shell knows NODE_RANK and MASTER_ADDR."""
    nodes = nodes_of(Decided(job))
    count = sum(one.count for one in nodes)
    if count == 1 and not node_limits(job).elastic:
        return [_torchrun(job, "", job.plan.ranks, folder)]
    commands = [worker(job, count, one.devices, '"$NODE_RANK"', '"$MASTER_ADDR"', folder) for one in nodes]
    if len(nodes) == 1:
        return commands
    return [
        f"{command}  # node {one.first}" + (f" to {one.first + one.count - 1}" if one.count > 1 else "")
        for command, one in zip(commands, nodes, strict=True)
    ]


def run_name(decided: Decided) -> str:
    """Return a name of small letters, digits and dashes, as clusters require."""
    word = re.sub(r"[^a-z0-9]+", "-", decided.plan.model.lower()).strip("-") or "model"
    return f"weft-{word[:30]}-{decided.plan.plan_id[:8]}"


def losses_of(decided: Decided, kind_by: str = "") -> list[Loss]:
    """Return the needs of the run that a launcher does not meet.

    `kind_by` says how to ask for a kind of nodes where each site has its own words for them.
    """
    losses, run = [], decided.run
    kinds = dict.fromkeys(group.device.name for group in decided.job.problem.job.cluster.groups)
    if kind_by and len(kinds) > 1:
        used = " and which ".join(dict.fromkeys(one.device.name for one in nodes_of(decided)))
        losses.append(Loss(f"which nodes are {used}, for which each site has its own words", kind_by))
    if run.cluster.use == "this-machine":
        what = "a plan for this machine, which another machine refuses"
        losses.append(Loss(what, "plan with --on and the cluster's expression"))
    for path in (run.model.hf, *sources_of(run.task.data), run.task.tokenizer):
        if path is not None and path.removeprefix("hf:").startswith("/"):
            losses.append(Loss(f"{path}, which all nodes must see", "copy it along"))
    return losses
