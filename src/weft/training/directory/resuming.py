"""The resume of a run under another plan: the check of the job, and the files in the run directory.

The launcher uses it; it does not import torch. The workers compare the job with the checkpoint itself
(`weft.training.checkpoint.training_state`). They also compare the data, which the launcher does not read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.bundles import parts
from weft.describe.added_layers import AddedLayers
from weft.describe.plan import Plan
from weft.describe.plan_file import load_plan
from weft.describe.run_file import RunFile, load_run
from weft.describe.run_tables.training import ANY_PRECISION
from weft.describe.synchronisation import AUTO
from weft.errors import InputError, Violation
from weft.files import replacing
from weft.planning.synchronisations import in_sync
from weft.training.checkpoint.manifest import CHECKPOINTS
from weft.training.checkpoint.training_state import OPTIMIZER, PRECISION, refuse_differences
from weft.training.directory.run_directory import (
    AT_HAND,
    PLAN_FILES,
    PLAN_OF_ALL,
    RunDirectory,
    fresh_directory,
)


def as_in(run: RunFile, path: Path) -> RunFile:
    """Return a run file with its open keys of the job filled in from the run directory `path`.

    The keys are the global batch, the precisions, the sequence, and a synchronisation left to the planner.

    Raises:
        InputError: if `path` is not a run directory or a file in it is broken.
    """
    RunDirectory(path).require()
    former = load_plan(RunDirectory(path).own_plan)
    names = ("global_batch", "precision", "reduce_precision")
    train = {name: getattr(former, name) for name in names}
    open_keys = {
        key: value for key, value in train.items() if getattr(run.train, key) in (None, ANY_PRECISION)
    }
    changes: dict[str, object] = {"train": run.train.model_copy(update=open_keys)}
    if run.task.sequence is None:
        changes["task"] = run.task.model_copy(update={"sequence": former.sequence})
    filled = run.model_copy(update=changes)
    return in_sync(filled, former.sync) if run.sync.method == AUTO else filled


def require_job_of(run: RunFile, plan: Plan, path: Path) -> None:
    """Refuse to resume the run of directory `path` under a run file and plan of another job.

    Raises:
        InputError: one line per difference.
    """
    former_run, former_plan = load_run(path / "run.toml"), load_plan(RunDirectory(path).own_plan)
    now = job_of(run, plan) | {"task.packing": run.task.packing}
    before = job_of(former_run, former_plan) | {"task.packing": former_run.task.packing}
    if now["model"] != before["model"]:
        own, former = _model_keys(run, plan), _model_keys(former_run, former_plan)
        changed = [key for key in sorted({*own, *former}) if own.get(key) != former.get(key)]
        if changed:
            # Its fingerprint says nothing to people.
            del now["model"]
        now = {key: own.get(key, "nothing") for key in changed} | now
        before |= {key: former.get(key, "nothing") for key in changed}
    refuse_differences(now, before, str(path))


def require_not_started(path: Path) -> None:
    """Refuse to write a new run over a started one.

    Raises:
        InputError: with the way to resume the started run.
    """
    if (path / "plan.json").exists() and any(
        (path / name).exists() for name in ("metrics.jsonl", CHECKPOINTS)
    ):
        raise InputError(
            Violation(
                str(path),
                "holds a run that has been started; to go on with it as this run file says: "
                f"--resume {path}; for another run choose another directory",
                str(fresh_directory(path.parent, path.name)),
            )
        )


@contextmanager
def removed_if_refused(path: Path) -> Iterator[None]:
    """Remove a run directory and the folders above it that are new, if the block is refused."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except InputError:
        if new:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            for folder in new[1:]:
                folder.rmdir()
        raise


@contextmanager
def kept_if_refused(path: Path) -> Iterator[None]:
    """Restore the former files of a run directory if the block, which replaces them, is refused."""
    folders = (path, RunDirectory(path).then)
    files = [
        path / "run.toml",
        path / PLAN_OF_ALL,
        *(folder / name for folder in folders for name in PLAN_FILES),
        *path.glob(f"{AT_HAND}/**/*"),
    ]
    former = {file: file.read_bytes() for file in files if file.is_file()}
    try:
        yield
    except InputError:
        shutil.rmtree(path / AT_HAND, ignore_errors=True)
        for file, content in former.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as unfinished:
                unfinished.write_bytes(content)
        raise


def job_of(run: RunFile, plan: Plan) -> dict[str, object]:
    """Return the values that identify a job, without its data, by the names of `job_of_state`."""
    return {
        "model": plan.model_fingerprint,
        PRECISION: plan.precision,
        "seed": run.train.seed,
        OPTIMIZER: run.optimizer.kept_states,
    }


def _model_keys(run: RunFile, plan: Plan) -> dict[str, object]:
    """Return the keys of a run file that a model's fingerprint depends on, with their values."""
    adding = {one.method for one in parts(AddedLayers)}
    tables = {"model": run.model, **{name: one for name, one in run.methods.items() if name in adding}}
    keys = {
        f"{name}.{key}": value
        for name, table in tables.items()
        for key, value in table.model_dump(exclude_none=True).items()
    }
    return {"task.sequence": plan.sequence, **keys}
