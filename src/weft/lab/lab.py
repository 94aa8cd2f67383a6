"""`open_lab`: build a scheme's lab, assign places, and remove everything, also remains of killed labs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.describe.cluster import Cluster
from weft.describe.cluster_tables import to_toml
from weft.errors import InputError, Violation
from weft.lab.cgroups import MEMBERS, Controller, find_controller
from weft.lab.network import NAMESPACES, lab_namespaces, make_network, remove_namespaces
from weft.lab.place import VARIABLE, LabPlaces, Place
from weft.lab.scheme import HUB_ADDRESS, INTERFACE, PREFIX, Scheme, pid_of, scheme_of

TOOLS = ("ip", "tc", "setpriv")
MASTER_PORT = 29500


@dataclass(frozen=True, slots=True)
class Lab:
    """An open lab: the place of the launcher, of each node's command, and of each rank."""

    scheme: Scheme
    launcher: Place
    nodes: tuple[Place, ...]
    ranks: LabPlaces

    def launcher_environment(self) -> dict[str, str]:
        """Return the variables with which weft's own launcher starts its ranks on the nodes."""
        return {VARIABLE: self.ranks.to_text()}

    def node_environment(self, node: int) -> dict[str, str]:
        """Return the variables of one node's command, with torchrun's names.

        Where every node has one device, they include the variables of its only rank.
        """
        scheme = self.scheme
        local = scheme.ranks_on(node)
        variables = {
            "NODE_RANK": str(node),
            "NNODES": str(len(scheme.nodes)),
            "MASTER_ADDR": scheme.nodes[0].address,
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "WORLD_SIZE": str(len(scheme.ranks)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if len(scheme.ranks) == len(scheme.nodes):
            variables |= {"RANK": str(local[0]), "LOCAL_RANK": "0"}
        return variables


@contextlib.contextmanager
def open_lab(cluster: Cluster) -> Iterator[Lab]:
    """Open the lab of this process, one at a time. At the block's end, remove it with all its processes.

    Raises:
        InputError: when no lab can emulate the cluster, or this system cannot run a lab.
        RunError: when a process of the lab does not end.
    """
    controller = require_system()
    scheme = scheme_of(cluster, sorted(os.sched_getaffinity(0)), os.getpid())
    sweep(controller)
    try:
        make_network(scheme)
        yield _placed(scheme, controller, to_toml(cluster))
    finally:
        controller.remove(scheme.name)
        remove_namespaces(scheme.pid)


def require_system() -> Controller:
    """Refuse a system without the requirements of a lab; return its controller of quotas.

    Raises:
        InputError: with the missing requirements and the remedy.
    """
    if sys.platform != "linux":
        raise InputError(Violation("lab", f"needs Linux, and this is {sys.platform}"))
    if os.geteuid() != 0:
        raise InputError(
            Violation("lab", "needs root to make networks and control groups: sudo weft lab ...")
        )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        problem = f"this system has no {', '.join(missing)}; install iproute2 and util-linux"
        raise InputError(Violation("lab", problem))
    return find_controller()


def sweep(controller: Controller) -> list[str]:
    """Remove the remains of dead labs, also of an earlier process with this process's number.

    Call it while this process has no lab. Return the names of the removed labs.

    Raises:
        RunError: when a process in such a lab does not end.
    """
    found = {pid_of(name) for name in (*lab_namespaces(), *controller.labs())}
    names = []
    for pid in sorted(pid for pid in found if pid is not None):
        if pid == os.getpid() or not Path(f"/proc/{pid}").exists():
            names.append(f"{PREFIX}{pid}")
            controller.remove(names[-1])
            remove_namespaces(pid)
    return names


def _placed(scheme: Scheme, controller: Controller, cluster: str) -> Lab:
    every = tuple(sorted(os.sched_getaffinity(0)))

    def place(name: str, quota: float | None, cores: tuple[int, ...], namespace: str = "") -> Place:
        group = controller.make(scheme.name, name, quota)
        return Place(str(NAMESPACES / namespace) if namespace else "", str(group / MEMBERS), cores)

    nodes = []
    for index, node in enumerate(scheme.nodes):
        local = [scheme.ranks[rank] for rank in scheme.ranks_on(index)]
        cores = tuple(sorted({rank.core for rank in local}))
        nodes.append(place(f"node-{index}", sum(rank.quota for rank in local), cores, node.namespace))
    ranks = tuple(
        place(f"rank-{number}", rank.quota, (rank.core,), scheme.nodes[rank.node].namespace)
        for number, rank in enumerate(scheme.ranks)
    )
    return Lab(
        scheme=scheme,
        launcher=place("launcher", None, every),
        nodes=tuple(nodes),
        ranks=LabPlaces(
            hub=str(NAMESPACES / scheme.hub),
            hub_address=HUB_ADDRESS,
            interface=INTERFACE,
            ranks=ranks,
            cluster=cluster,
        ),
    )
