"""Runs trained by the test session's worker processes: all of `weft train` but the start of new processes."""

from __future__ import annotations

import os
from pathlib import Path

from pool import WorkerPool

from weft.api import finished, prepared
from weft.describe.home import weft_home
from weft.run.launch.worker_start import WorkerContext
from weft.training.loop import train
from weft.training.session import reopen


def trained(
    pool: WorkerPool,
    source: Path,
    *,
    directory: Path | None = None,
    steps: int | None = None,
    resume: Path | None = None,
) -> Path:
    """Train a run file like `weft.train`, which takes the same arguments, and return the run directory.

    Raises:
        AssertionError: when a rank does not end well.
    """
    planned, run = prepared(source, directory=directory, steps=steps, resume=resume)
    ranks = planned.plan.ranks
    assert pool.run(_train_rank, run.path, weft_home(), ranks=ranks) == [0] * ranks
    return finished(run.path).directory


def _train_rank(rank: int, ranks: int, run_dir: Path, home: Path) -> int:
    os.environ["WEFT_HOME"] = str(home)
    return train(reopen(run_dir), run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))
