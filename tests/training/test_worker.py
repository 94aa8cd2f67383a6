"""The worker as a command: its exit codes and what it prints."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.describe.run_file import load_run
from weft.planning.planned import plan_run

pytestmark = pytest.mark.processes

CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 16,
    "tie_word_embeddings": False,
}
CLUSTER = """
name = "two"
[[node]]
name = "all"
count = 1
device = "cpu"
devices = {ranks}
bandwidth = "1 GB/s"
latency = "50 us"
[device.cpu]
flops = {{ fp32 = "50 GFLOP/s" }}
memory = "4 GB"
memory_bandwidth = "10 GB/s"
launch = "1 us"
synchronous = true
"""


def run_directory(tmp_path: Path, *, ranks: int, steps: int) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps(CONFIG))
    (run_dir / "cluster.toml").write_text(CLUSTER.format(ranks=ranks))
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
    (run_dir / "plan.json").write_text(planned.plan.to_json())
    return run_dir


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**kept, "WEFT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}


@contextmanager
def worker(run_dir: Path, tmp_path: Path, *launcher: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        *launcher,
        *(["-m"] if launcher else []),
        "weft.training.worker",
        str(run_dir),
    ]
    with subprocess.Popen(
        command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ending(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it printed."""
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_torchrun_takes_the_place_of_launcher_and_agent(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path, ranks=2, steps=8)
    with worker(
        run_dir, tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    ) as process:
        code, errors = ending(process)
    assert code == 0, errors
    result = json.loads((run_dir / "result.json").read_text())
    assert result["final_loss"] < result["first_loss"]
    assert len(result["max_rss_bytes"]) == 2
    assert (run_dir / "checkpoints" / "step-00000008" / "manifest.json").exists()


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
    assert line.startswith("error: 1 ranks were started; the plan uses 2")
