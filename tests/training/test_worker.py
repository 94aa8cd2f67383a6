"""The worker as a command: its exit codes and what it prints; what it loads before it is copied."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import waiting_runs
from torchrun_runs import ending, free_port, run_directory, worker
from warm_starts import Template

import weft
from weft.cli.main import run
from weft.describe.families.own import FAMILY
from weft.describe.plan_file import PlanFile
from weft.describe.plan_subject import PlanSubject
from weft.describe.run_file import parse_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

LOAD = """
import os, sys, threading
from pathlib import Path
from weft.training.worker import load

load(Path(sys.argv[1]))
import torch
native = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
# Arrow's allocator has a thread of its own, and starts it anew after a fork.
print(threading.active_count(), sum(one != "jemalloc_bg_thd" for one in native), torch.cuda.is_initialized())
asked = {"weft.training.loop", "weft.methods.lora.runtime", "weft.run.stage.families.gpt", "own_model"}
print(sorted(asked & set(sys.modules)))
"""
OF_ALL_RUNS = ["weft.methods.lora.runtime", "weft.training.loop"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Path:
    """The directory of a run that `torchrun` has trained on two ranks."""
    tmp_path = tmp_path_factory.mktemp("trained")
    run_dir = run_directory(tmp_path, ranks=2, steps=8)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with template.warming(), worker(run_dir, tmp_path, *torchrun) as process:
        code, errors = ending(process)
    assert code == 0, errors
    return run_dir


def test_torchrun_takes_the_place_of_launcher_and_agent(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    assert result["final_loss"] < result["first_loss"]
    assert len(result["max_rss_bytes"]) == 2
    assert (trained / "checkpoints" / "step-00000008" / "manifest.json").exists()


def test_under_torchrun_a_killed_rank_is_named_by_one_that_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines: of rank 0, which stands still, and rank 1, which waits for it; and of rank 2."""
    run_dir = run_directory(tmp_path, ranks=3, steps=4)
    waits = (run_dir / "run.toml").read_text().replace("[task]", '[task]\nkind = "waiting_task:Waits"')
    (run_dir / "run.toml").write_text(waits)
    for name, value in waiting_runs.variables(tmp_path, wait_in_step=2).items():
        monkeypatch.setenv(name, value)
    meeting = ("torch.distributed.run", "--nnodes", "2", "--master-port", str(free_port()))
    with (
        worker(run_dir, tmp_path, *meeting, "--node-rank", "0", "--nproc-per-node", "2") as here,
        worker(run_dir, tmp_path, *meeting, "--node-rank", "1", "--nproc-per-node", "1") as there,
    ):
        waiting_runs.wait_for((run_dir / "metrics.jsonl").exists, here)
        ranks = [psutil.Process(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(3)]
        ranks[2].kill()
        # Rank 0 neither ends nor closes a connection.
        ranks[1].wait(timeout=20)
        (tmp_path / "go-on").touch()
        ended = [ending(one) for one in (here, there)]
    assert [code for code, _ in ended] == [1, 1]
    lines = [line for line in ended[0][1].splitlines() if line.startswith("error: rank")]
    assert len(lines) == 2
    assert all(line.endswith(f"; rank 2 on {socket.gethostname()} is gone") for line in lines)
    psutil.wait_procs(ranks, timeout=20)
    assert not any(one.is_running() for one in ranks)


def test_a_signal_stops_after_a_checkpoint_with_its_own_exit_code(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path, ranks=1, steps=10**6)
    with worker(run_dir, tmp_path) as process:
        deadline = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.terminate()
        code, errors = ending(process)
    assert code == 143, errors
    assert "Traceback" not in errors
    last_line = (run_dir / "metrics.jsonl").read_text().splitlines()[-1]
    steps_done = json.loads(last_line)["step"] + 1
    assert (run_dir / "checkpoints" / f"step-{steps_done:08d}" / "manifest.json").exists()


def test_what_is_no_run_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    with worker(tmp_path, tmp_path) as process:
        code, errors = ending(process)
    assert code == 2, errors
    assert errors.strip().splitlines() == [f"error: {tmp_path}: not a run directory: it has no run.toml"]


def test_another_number_of_ranks_is_refused_in_one_line(tmp_path: Path) -> None:
    with worker(run_directory(tmp_path, ranks=2, steps=1), tmp_path) as process:
        code, errors = ending(process)
    assert code == 2, errors
    (line,) = errors.strip().splitlines()
    assert line.startswith("error: started with 1 rank; the plan uses 2")


def test_a_worker_that_waits_for_a_rank_which_does_not_come_can_be_ended(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path, ranks=2, steps=1)
    port = free_port()
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with worker(run_dir, tmp_path, **job, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) as process:
        deadline = time.monotonic() + 60
        while not (met := listens(port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.terminate()
        code, errors = ending(process)
    assert met
    assert code == -signal.SIGTERM, errors


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_a_rank_that_stops_while_a_checkpoint_is_loaded_ends_the_launcher_with_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped, task = tmp_path / "stopped", '[task]\nkind = "late_task:StopsInLoad"'
    text = (trained / "run.toml").read_text().replace("[task]", task)
    (trained / "run.toml").write_text(text + "[checkpoint]\nload_timeout_s = 1\n")
    monkeypatch.setenv("WEFT_HOME", str(trained.parent / "home"))
    monkeypatch.setenv("STOPPED", str(stopped))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
    assert run(["train", str(trained)]) == 1
    *_, line = capfd.readouterr().err.splitlines()
    assert f"{trained}/checkpoints/step-00000008: rank 1 read nothing for 1 s while others waited" in line
    assert not psutil.pid_exists(int(stopped.read_text()))


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are copies of the agent on Linux only")
@pytest.mark.parametrize(
    ("table", "family", "loaded"),
    [
        pytest.param(
            *({"preset": "gpt-1m"}, "gpt", [*OF_ALL_RUNS, "weft.run.stage.families.gpt"]),
            marks=pytest.mark.tables,
        ),
        ({"build": "own_model:build"}, FAMILY, OF_ALL_RUNS),
    ],
)
def test_load_starts_no_thread_and_runs_nothing_of_the_user(
    tmp_path: Path, table: dict[str, str], family: str, loaded: list[str]
) -> None:
    planned = weft.plan(model="gpt-1m", on="1xa100-80gb").job
    model = replace(planned.problem.model, family=family)
    subject = PlanSubject(run=parse_run({"model": table}), model=model, cluster=planned.problem.job.cluster)
    (tmp_path / "plan.json").write_text(PlanFile(planned.plan, subject=subject).to_json())
    (tmp_path / "own_model.py").write_text("raise RuntimeError('imported')\n")
    # Otherwise BLAS starts its threads when it is imported; it ends them before a fork.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"1 1 False\n{sorted(loaded)}\n"
