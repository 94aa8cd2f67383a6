"""`open_lab`: build a scheme's lab, assign places, and remove everything, also remains of killed labs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
def open_lab(cluster: Cluster, named: str | None = None) -> Iterator[Lab]:
    """Open the lab of this process, one at a time. At the block's end, remove it with all its processes.

    `named` is an expression or an absolute path that names the cluster to commands inside; default: its name.

    Raises:
        InputError: when no lab can emulate the cluster, or this system cannot run a lab.
        RunError: when a process of the lab does not end.
    """
    controller = require_system()
    scheme = scheme_of(cluster, sorted(os.sched_getaffinity(0)), os.getpid())
    sweep(controller)
    try:
        make_network(scheme)
        yield _placed(scheme, controller, to_toml(cluster), named or cluster.name)
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
        # sudo alone has a path of its own, without a virtual environment.
        remedy = 'sudo env "PATH=$PATH" weft lab ...'
        raise InputError(Violation("lab", f"needs root to make networks and control groups: {remedy}"))
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


def _placed(scheme: Scheme, controller: Controller, cluster: str, named: str) -> Lab:
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
            named=named,
        ),
    )


POLL_S = 0.05
# Time limit of a stopped command: a training run saves a checkpoint first.
STOP_S = 120.0


def run_launcher(lab: Lab, command: Sequence[str]) -> int:
    """Run a command once, outside the nodes; ranks that weft starts inside it move to their nodes.

    Return its exit code, or 128 plus the number of the signal that ended it.

    Raises:
        InputError: when the command cannot be started.
        KeyboardInterrupt: after Ctrl-C, when the command has ended.
        SystemExit: after SIGTERM in `terminable`, when the command has ended.
    """
    return _run([(lab.launcher, lab.launcher_environment())], command)


def run_on_nodes(lab: Lab, command: Sequence[str]) -> int:
    """Run a command on every node at the same time; a failure on one node ends the others.

    Return 0, or the exit code of the first failed command.

    Raises:
        As `run_launcher`.
    """
    return _run([(place, lab.node_environment(index)) for index, place in enumerate(lab.nodes)], command)


def _run(starts: Sequence[tuple[Place, Mapping[str, str]]], command: Sequence[str]) -> int:
    processes: list[subprocess.Popen[bytes]] = []
    if shutil.which(command[0]) is None:
        raise InputError(Violation("lab", f"{command[0]}: no such command"))
    try:
        for place, variables in starts:
            processes.append(_start(place, variables, command))
        return _first_failure(processes)
    except (KeyboardInterrupt, SystemExit) as stop:
        _stop(processes, signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(place: Place, variables: Mapping[str, str], command: Sequence[str]) -> subprocess.Popen[bytes]:
    # In its own session: Ctrl-C in the terminal must reach it once, through this process.
    try:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env={**os.environ, **variables},
            preexec_fn=place.enter,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(Violation("lab", f"{command[0]} cannot be started: {error}")) from None


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return 128 - failed if failed < 0 else failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)


def _stop(processes: Sequence[subprocess.Popen[bytes]], signal_number: int) -> None:
    """Forward a signal and wait; a second Ctrl-C or SIGTERM ends the wait."""
    for process in processes:
        process.send_signal(signal_number)
    deadline = time.monotonic() + STOP_S
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
