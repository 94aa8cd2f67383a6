"""The command about emulated clusters: `lab`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.cli.output import Flag
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.lab.lab import open_lab, run_launcher, run_on_nodes
from weft.lab.scheme import Scheme
from weft.signals import terminable


def lab(
    cluster: str,
    /,
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    per_node: Flag = False,
) -> int:
    """Run a command on an emulated cluster of unequal devices and links.

    This needs Linux and root.

    The ranks of `weft train` and `weft measure` inside it run on the cluster's nodes.

    - `weft lab cluster.toml -- weft train run.toml --on cluster.toml`
    - `weft lab cluster.toml --per-node -- torchrun --nnodes 2 train.py`

    Parameters
    ----------
    cluster
        A CLUSTER.toml, or an expression such as 1xa100-40gb+1xv100-32gb.
    command
        The command to run, after --.
    per_node
        Run the command on every node instead of once, with the environment variables of torchrun.
    """
    if not command:
        raise InputError(Violation("lab", "no command given: weft lab CLUSTER.toml -- COMMAND"))
    if command[0].startswith("-"):
        raise InputError(
            Violation("lab", f"{command[0]}: no such option; a command begins otherwise", "--per-node")
        )
    described = parse_cluster(cluster)
    # A command may work in another folder.
    named = str(Path(cluster).resolve()) if Path(cluster).exists() else cluster
    with terminable(), open_lab(described, named) as opened:
        _say(described, opened.scheme)
        return (run_on_nodes if per_node else run_launcher)(opened, command)


def _say(cluster: Cluster, scheme: Scheme) -> None:
    """Print the shares of cores and links to standard error; standard output belongs to the command."""
    used = len({rank.core for rank in scheme.ranks})
    lines = [f"a device of relative speed 1 has {scheme.share:.1%} of a core; cores used: {used}"]
    for index, node in enumerate(scheme.nodes):
        quotas = ", ".join(f"{scheme.ranks[rank].quota:.1%}" for rank in scheme.ranks_on(index))
        rates = [
            f"{format_bytes(rate)}/s to {other.name}"
            for other, rate in zip(scheme.nodes, node.rates, strict=True)
            if rate
        ]
        lines.append("; ".join([f"{node.name}: {quotas} of a core", *rates]))
    longest = max((link.latency_s for link in cluster.links.values()), default=0.0)
    if longest:
        lines.append(
            f"latencies are the kernel's own; the file's, up to {format_seconds(longest)}, are not made"
        )
    for line in lines:
        print(f"lab: {line}", file=sys.stderr)
