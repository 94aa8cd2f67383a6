"""Runs that `torchrun` trains: their directories, and its processes."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from run_inputs import CONFIG, cluster_text

from weft.describe.plan_file import PlanFile
from weft.describe.run_file import load_run
from weft.planning.planned import plan_run


def run_directory(tmp_path: Path, *, ranks: int, steps: int) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps(CONFIG))
    (run_dir / "cluster.toml").write_text(cluster_text(ranks))
    (run_dir / "text.txt").write_text("the weft goes under and over the warp\n" * 100)
    (run_dir / "run.toml").write_text(
        f"""
        [model]
        hf = "config.json"
        [task]
        data = "text.txt"
        [train]
        steps = {steps}
        global_batch = 8
        precision = "fp32"
        [cluster]
        use = "cluster.toml"
        [plan]
        pp = {ranks}
        micro_batch_size = 2
        """
    )
    planned = plan_run(load_run(run_dir / "run.toml"))
    (run_dir / "plan.json").write_text(PlanFile(planned.plan).to_json())
    return run_dir


def free_port() -> int:
    """A port of loopback that is free, and that no connection takes until another process listens there.

    Linux chooses the ports of connections from 32768 on.
    """
    while True:
        try:
            with socket.create_server(("127.0.0.1", secrets.choice(range(20_000, 32_000)))) as free:
                return int(free.getsockname()[1])
        except OSError:
            continue


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**kept, "WEFT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}


@contextmanager
def worker(
    run_dir: Path, tmp_path: Path, *launcher: str, module: str = "weft.training.worker", **variables: str
) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        *launcher,
        *(["-m"] if launcher else []),
        module,
        str(run_dir),
    ]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path) | variables,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ending(process: subprocess.Popen[str], within_s: float = 180) -> tuple[int, str]:
    """Exit code and what it printed."""
    _, errors = process.communicate(timeout=within_s)
    return process.returncode, errors
