"""`weft measure --nodes`: every node runs it, and the first rank prints the links."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from weft.cli.output import console, print_json, progressing
from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_file import load_cluster
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.predict.cost.calibration import save_cluster
from weft.run.launch.slurm_step import torchrun_variables
from weft.run.launch.workers import require_torch

if TYPE_CHECKING:
    from weft.capture.nodes import MeasuredNodes


def measure_links(file: Path, *, as_json: bool) -> None:
    """Measure the links of the nodes that run this together, and keep them in a copy of the file.

    Raises:
        InputError: if the file is broken, no launcher started the ranks, or a node is not of the cluster.
        RunError: if the ranks do not meet.
    """
    cluster = load_cluster(file)
    require_torch()
    os.environ.update(torchrun_variables(os.environ))
    if "RANK" not in os.environ:
        problem = "every node runs this command, one rank for each device; no launcher has started it so"
        raise InputError(Violation("--nodes", problem, _launchers(cluster, f"weft measure --nodes {file}")))
    from weft.capture.nodes import measure_nodes
    from weft.run.launch.worker_start import start_worker

    context = start_worker()
    if context.rank:
        measure_nodes(cluster, context)
        context.close()
        return
    with progressing("measuring") as report:
        measured = measure_nodes(cluster, context, report)
    context.close()
    path = save_cluster(measured.cluster, weft_home())
    slow = [f"slow: {one.words}, {format_bytes(one.link.bytes_per_s)}/s" for one in measured.slow]
    if as_json:
        print_json({"links": [_record(one.words, one.link) for one in measured.links], "file": str(path)})
        return
    out = console()
    out.print(_table(measured))
    for line in [*slow, f"wrote {path}; next: weft plan gpt2 --on {path}"]:
        out.print(line, soft_wrap=True)


def _launchers(cluster: Cluster, command: str) -> str:
    """Return the commands of launchers that start a command once for each device of a cluster."""
    nodes, sizes = sum(group.count for group in cluster.groups), {group.devices for group in cluster.groups}
    devices = sizes.pop() if len(sizes) == 1 else None
    each = f"--ntasks {cluster.ranks}" if devices is None else f"--ntasks-per-node {devices}"
    ranks = f"--nnodes {nodes} --node-rank I --nproc-per-node {devices or 'DEVICES'}"
    started = f"torchrun {ranks} --master-addr HOST --no-python {command}"
    return f"srun --nodes {nodes} {each} {command}; or on every node: {started}"


def _table(measured: MeasuredNodes) -> Table:
    table = Table("link", "measured", "rate", "latency", "slowest", box=None, pad_edge=False)
    kinds: dict[str, list[Link]] = {}
    for one in measured.links:
        name = f"inside {one.pair[0]}" if one.is_inside else " - ".join(one.pair)
        kinds.setdefault(name, []).append(one.link)
    usual = {f"inside {group.name}": group.link for group in measured.cluster.groups}
    usual |= {" - ".join(pair): link for pair, link in measured.cluster.links.items()}
    for name, links in kinds.items():
        median, slowest = usual[name], min(link.bytes_per_s for link in links)
        rates = (f"{format_bytes(rate)}/s" for rate in (median.bytes_per_s, slowest))
        table.add_row(name, str(len(links)), next(rates), format_seconds(median.latency_s), next(rates))
    return table


def _record(words: str, link: Link) -> dict[str, Any]:
    return {"link": words, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
