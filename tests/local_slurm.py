"""A Slurm cluster of two nodes on this machine: real programs, with files and ports of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from torchrun_runs import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
LIMIT_S, LATER_S = 120.0, 5
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING")
CONFIGURATION = """
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/begin
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_min_age_reserve=0,sched_min_interval=100000
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def names_of_nodes() -> tuple[str, str]:
    """The first one in alphabetical order is the machine's own: jobs look up the first of their nodes."""
    own = socket.gethostname().partition(".")[0]
    return own, f"{own}-again"


def missing() -> str:
    """Why there is no Slurm here, or an empty text."""
    lacking = [one for one in PROGRAMS if shutil.which(one) is None]
    if lacking:
        return f"Slurm is not installed: {', '.join(lacking)}"
    if os.geteuid():
        return "slurmd starts the tasks of jobs as root"
    name, _ = names_of_nodes()
    try:
        socket.gethostbyname(name)
    except OSError:
        return f"{name}, this machine's name, has no address"
    return "Slurm takes no node by the name of localhost" if name == "localhost" else ""


class LocalSlurm:
    """The cluster, from a folder with its configuration."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lost = folder, False
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def states(self) -> list[str]:
        """The states of the nodes; none while nobody answers."""
        command = ["sinfo", "-h", "-N", "-o", "%t"]
        asked = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return asked.stdout.split()

    def submit(self, script: Path) -> str:
        """Submit a script in its folder, and return the job's number."""
        return self.call("sbatch", "--parsable", script.name, cwd=script.parent).strip()

    def state(self, job: str) -> dict[str, str]:
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, reached: Callable[[], bool]) -> None:
        """Wait until something is so, while the job runs."""
        ends_s = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < ends_s, "it takes too long"
            assert self.state(job)["JobState"] in UNDER_WAY, self.state(job)
            time.sleep(0.2)

    def ended(self, job: str) -> tuple[str, str]:
        """Wait for the end of a job, and return its state and exit code.

        After the loss of a node it stays `COMPLETING`.
        """
        ends_s = time.monotonic() + LIMIT_S
        under_way = (*UNDER_WAY, "COMPLETING") if not self._lost else UNDER_WAY
        while (found := self.state(job))["JobState"] in under_way:
            assert time.monotonic() < ends_s, "it takes too long"
            time.sleep(0.5)
        return found["JobState"], found["ExitCode"]

    def cancel_all(self) -> None:
        """Cancel the jobs that a failed test has left, and wait for their ends."""
        for job in self.call("squeue", "-h", "-o", "%i").split():
            self.call("scancel", job)
            self.ended(job)

    def lose(self, node: str) -> None:
        """Kill all processes of a node: its daemon, and what runs in the job's step."""
        self._lost = True
        daemon = psutil.Process(int((self._folder / f"slurmd-{node}.pid").read_text()))
        tasks = [one for one in psutil.process_iter() if _is_task_of(one, node, self._folder)]
        for one in [daemon, *tasks]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)


def _is_task_of(process: psutil.Process, node: str, folder: Path) -> bool:
    try:
        variables = process.environ()
    except psutil.Error:
        return False
    own = variables.get("SLURM_CONF") == str(folder / "slurm.conf")
    return own and variables.get("SLURMD_NODENAME") == node


@contextmanager
def local_slurm(folder: Path) -> Iterator[LocalSlurm]:
    """Two nodes with two processors each."""
    if reason := missing():
        pytest.skip(reason)
    nodes = (
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
        for name in names_of_nodes()
    )
    text = CONFIGURATION.format(
        port=free_port(), user=psutil.Process().username(), folder=folder, nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    # The address of a meeting is that of both nodes here, and whoever comes first holds it.
    begin = folder / "begin"
    begin.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = {names_of_nodes()[0]} ] || sleep {LATER_S}\n')
    begin.chmod(0o755)
    slurm = LocalSlurm(folder)
    with ExitStack() as stack:

        def start(*command: str) -> None:
            log = stack.enter_context(open(folder / f"{command[0]}.log", "ab"))
            process = subprocess.Popen(
                command, env=slurm.environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(_end, process)

        start("slurmctld", "-D")
        for name in names_of_nodes():
            (folder / f"spool-{name}").mkdir()
            start("slurmd", "-D", "-N", name)
        ends_s = time.monotonic() + LIMIT_S
        while slurm.states() != ["idle", "idle"]:
            assert time.monotonic() < ends_s, "its nodes do not come"
            time.sleep(0.2)
        stack.callback(slurm.cancel_all)
        yield slurm


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
