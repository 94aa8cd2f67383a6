"""Runs that are stopped and go on, beside the same run straight through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pool import WorkerPool
from pooled_runs import trained
from safetensors.torch import load_file

TEXT_RUN = """
[model]
{model}
[task]
data = "{folder}/text.txt"
sequence = 16
[train]
global_batch = 4
steps = {steps}
[plan]
pp = 2
dp = 1
micro_batch_size = 1
schedule = "1f1b"
"""


def text_run(folder: Path, more: str = "", *, steps: int = 4, model: str = 'preset = "gpt-1m"') -> str:
    """A run of a small model on a text in the folder; `more` are keys of its plan, and sections."""
    (folder / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)
    return TEXT_RUN.format(folder=folder, steps=steps, model=model) + more


def through_and_stopped(
    pool: WorkerPool, folder: Path, run_file: str, *, steps: int, stop: int
) -> tuple[Path, Path]:
    """The directories of a run trained in one go, and of the same stopped after step `stop` and resumed.

    Raises:
        AssertionError: when a rank fails, or they do not end with the same bits.
    """
    directories = folder / "through", folder / "stopped"
    source = folder / "run.toml"
    source.write_text(run_file)
    through, stopped = directories
    trained(pool, source, directory=through, steps=steps)
    trained(pool, source, directory=stopped, steps=stop)
    trained(pool, source, resume=stopped, steps=steps)
    expected, found = map(saved, directories)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    return directories


def saved(directory: Path, checkpoint: int = -1) -> dict[str, Any]:
    """All tensors of one of a run's checkpoints, of the newest one unless told."""
    chosen = sorted((directory / "checkpoints").iterdir())[checkpoint]
    return {name: value for file in chosen.glob("*.safetensors") for name, value in load_file(file).items()}
