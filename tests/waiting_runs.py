"""Small runs of two ranks in which rank 0 waits for a file (`waiting_task`), and their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from run_inputs import CONFIG

SAMPLES_PER_STEP = 8
RUN = f"""
[model]
hf = "{{folder}}/config.json"
[task]
kind = "waiting_task:Waits"
data = "{{folder}}/text.txt"
[train]
steps = {{steps}}
global_batch = {SAMPLES_PER_STEP}
precision = "fp32"
[cluster]
use = "this-machine"
[plan]
pp = 2
dp = 1
micro_batch_size = 2
"""


def write_run_file(folder: Path, *, steps: int, tables: str) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("the weft goes under and over the warp\n" * 100)
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder, steps=steps) + tables)
    return path


def variables(folder: Path, *, wait_in_step: int) -> dict[str, str]:
    """The environment of a run that waits from that step on for the file `go-on` in its folder."""
    return {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "WEFT_HOME": str(folder / "home"),
        "WAIT_FROM": str(wait_in_step * SAMPLES_PER_STEP),
        "GO_ON": str(folder / "go-on"),
    }


@contextmanager
def process(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process of Python that is killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def wait_for(condition: Callable[[], bool], started: subprocess.Popen[str]) -> None:
    # Starts take minutes of a machine that runs many of them at once.
    deadline = time.monotonic() + 300
    while not condition():
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
