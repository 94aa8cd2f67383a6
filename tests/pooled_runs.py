"""Runs trained by the test session's worker processes: all of `weft train` but the start of new processes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from installing import found
from pool import WorkerPool

from weft.api import finished
from weft.files import weft_home
from weft.planning.planned_job import PlannedJob
from weft.run.launch.worker_start import WorkerContext
from weft.training.directory.run_directory import RunDirectory
from weft.training.loop import train
from weft.training.session import job_to_train, prepare, reopen


def prepared(source: PlannedJob | Path, **options: Any) -> tuple[PlannedJob, RunDirectory]:
    """Plan a run and write its directory, with the options of `job_to_train`."""
    planned, path = job_to_train(source, **options)
    with prepare(planned, path) as directory:
        return planned, directory


def trained(
    pool: WorkerPool,
    source: Path,
    *,
    directory: Path | None = None,
    steps: int | None = None,
    resume: Path | None = None,
    packages: Path | None = None,
) -> Path:
    """Train a run file like `weft.train`, which takes the same arguments, and return the run directory.

    Ranks find the packages in `packages`, too.

    Raises:
        AssertionError: when a rank does not end well.
    """
    planned, run = prepared(source, directory=directory, steps=steps, resume=resume)
    ranks = planned.plan.ranks
    assert pool.run(_train_rank, run.path, weft_home(), packages, ranks=ranks) == [0] * ranks
    return finished(run.path).directory


def _train_rank(rank: int, ranks: int, run_dir: Path, home: Path, packages: Path | None) -> int:
    os.environ["WEFT_HOME"] = str(home)
    with nullcontext() if packages is None else found(packages):
        return train(reopen(run_dir), run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))
