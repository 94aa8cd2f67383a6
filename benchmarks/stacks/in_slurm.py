"""Slurm: a controller of this program's own, whose nodes are claimed and not there, tests every script.

`sbatch --test-only` reads a script's requests and says when and where it would start. A script for processors
is submitted to this machine, cut to a few steps, where `weft` is a command. The controller and this machine's
daemon listen on loopback and end with this program.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from answering import answer

PORT, NODES, DEVICES, PROCESSORS = 26817, 64, 8, 64
_OPENING_S, _TIME_LIMIT_S, _RUN_LIMIT_S = 20.0, 60, 300
STEPS = 3
_CONFIGURATION = """\
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
SlurmdPort={daemon_port}
SlurmdUser=root
SlurmdSpoolDir={folder}/spool
SlurmdPidFile={folder}/daemon.pid
StateSaveLocation={folder}
SlurmctldPidFile={folder}/controller.pid
ProctrackType=proctrack/pgid
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=node[1-{nodes}] NodeAddr=127.0.0.1 CPUs={processors} Gres=gpu:{devices} State=CLOUD
NodeName={host} NodeAddr=127.0.0.1 CPUs={own_processors}
PartitionName=claimed Nodes=node[1-{nodes}] Default=YES State=UP
PartitionName=here Nodes={host} State=UP
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=3600
"""


def check(file: Path, case: Mapping[str, Any]) -> None:
    run = subprocess.run(
        ["sbatch", "--test-only", str(file)], capture_output=True, text=True, timeout=_TIME_LIMIT_S
    )
    said = run.stderr.strip()
    if run.returncode or "to start at" not in said:
        raise ValueError(said)
    script = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, timeout=_TIME_LIMIT_S)
    if script.returncode:
        raise ValueError(script.stderr)
    if "--gpus-per-node" not in file.read_text() and shutil.which("weft") is not None:
        runs_here(file)
        return
    sizes = re.findall(r"--nproc-per-node (\d+)", file.read_text())
    if max(map(int, sizes)) > DEVICES:
        raise ValueError(f"{sizes} ranks on nodes of {DEVICES} devices")


def runs_here(file: Path) -> None:
    """Submit the script, and wait until it has trained and compared what it measured."""
    script, said = file.with_suffix(".cut.sh"), file.with_suffix(".said")
    script.write_text(re.sub(r"^steps = \d+$", f"steps = {STEPS}", file.read_text(), flags=re.MULTILINE))
    command = ["sbatch", "--wait", "--partition=here", f"--output={said}", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_LIMIT_S, cwd=file.parent)
    text = said.read_text() if said.exists() else run.stderr
    if run.returncode or "predicted" not in text:
        raise ValueError(f"the job ends with {run.returncode}: {text[-200:]}")


@contextlib.contextmanager
def controller() -> Iterator[None]:
    """A controller, with `SLURM_CONF` set for the commands that ask it.

    Raises:
        RuntimeError: when it does not answer; the text is what it said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        configuration, said = Path(folder) / "slurm.conf", Path(folder) / "said"
        values = {"port": PORT, "nodes": NODES, "devices": DEVICES, "processors": PROCESSORS}
        values |= {"daemon_port": PORT + 1, "own_processors": os.cpu_count() or 1}
        host = socket.gethostname().partition(".")[0]
        configuration.write_text(_CONFIGURATION.format(host=host, folder=folder, **values))
        os.environ["SLURM_CONF"] = str(configuration)
        with said.open("w") as log:
            process = subprocess.Popen(["slurmctld", "-D", "-f", configuration], stdout=log, stderr=log)
            daemon = subprocess.Popen(
                ["slurmd", "-D", "-f", configuration, "-N", host], stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + _OPENING_S
            while subprocess.run(["scontrol", "ping"], capture_output=True, timeout=_TIME_LIMIT_S).returncode:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"slurmctld does not answer: {said.read_text()[-300:]}")
                time.sleep(0.2)
            yield
        finally:
            for one in (daemon, process):
                one.terminate()
                one.wait(_TIME_LIMIT_S)


if __name__ == "__main__":
    with controller():
        said = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, check=True)
        answer(said.stdout.strip(), check)
