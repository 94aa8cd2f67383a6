"""What a training worker loads before the agent copies itself into the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import os, sys, threading
from pathlib import Path
from weft.training.worker import load

load(Path(sys.argv[1]))
import torch
native = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
# Arrow's allocator has a thread of its own, and starts it anew after a fork.
print(threading.active_count(), sum(one != "jemalloc_bg_thd" for one in native), torch.cuda.is_initialized())
print(sorted({"weft.training.loop", "weft.run.stage.families.gpt", "own_model"} & set(sys.modules)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are copies of the agent on Linux only")
@pytest.mark.parametrize(
    ("model", "loaded"),
    [
        ('preset = "gpt-1m"', ["weft.run.stage.families.gpt", "weft.training.loop"]),
        ('build = "own_model:build"', ["weft.training.loop"]),
    ],
)
def test_load_starts_no_thread_and_runs_nothing_of_the_user(
    tmp_path: Path, model: str, loaded: list[str]
) -> None:
    (tmp_path / "run.toml").write_text(f"[model]\n{model}\n")
    (tmp_path / "own_model.py").write_text("raise RuntimeError('imported')\n")
    # Otherwise BLAS starts its threads when it is imported; it ends them before a fork.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"1 1 False\n{loaded}\n"
