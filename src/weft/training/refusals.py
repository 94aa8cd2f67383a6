"""Reasons to refuse a planned job before any worker starts; without torch.

`weft check` lists them, and `weft train` begins with them. Workers check their own parts again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from weft.describe.families.own import FAMILY
from weft.describe.tasks import CHAT, DRAWN, is_language, only_source, sources_of
from weft.errors import InputError, RunError, Violation
from weft.files import weft_home
from weft.planning.elastic import refused_limits
from weft.planning.job_rules import refused_by_methods
from weft.planning.lost_replicas import refused_deaths
from weft.planning.planned_job import PlannedJob
from weft.run.stage.compilable import compile_problems
from weft.run.supported import missing_packages, planned_only, unsupported
from weft.training.checkpoint.manifest import CHECKPOINTS, generations, verify
from weft.training.checkpoint.remote_storage import RemoteStorage
from weft.training.checkpoint.training_state import job_of_state, read_state, refuse_differences
from weft.training.data.chats import require_chats
from weft.training.data.indexed import indexed_name, open_indexed
from weft.training.data.sources import open_texts
from weft.training.data.synthetic import require_synthetic
from weft.training.data.tokenizers import get_tokenizer, require_classes, tokenizer_name
from weft.training.directory.resuming import job_of
from weft.training.interchange.weight_files import weight_files
from weft.training.loggers import require_loggers
from weft.training.task_class import task_class

_MASKED = "masked-lm"


def refusals(planned: PlannedJob) -> list[Violation]:
    """Return all reasons that need no worker; empty if the job can start.

    The plan must be one that the runtime executes; loggers, packages, data, tokenizer and initial weights
    must be there. A user's own task is imported here, and opens its data in the workers. Without torch,
    neither is looked at.
    """
    problems = planned_only(planned.problem.model) + planned.elsewhere + planned.misplaced
    for job in planned.all:
        problems += unsupported(job.plan) + missing_packages(job.plan) + job.uncounted + job.unlogged
        problems += refused_by_methods(job) + refused_deaths(job) + refused_limits(job)
        if planned.run.train.compile:
            problems += compile_problems(job.plan, job.program.columns.kind, job.problem.job.graph)
    # Tokenizers and images need packages that torch's extra brings.
    prepared = (_tokenizer, _data) if find_spec("torch") else ()
    for check in (_modules, _loggers, *prepared, _weights, _checkpoint_folder):
        problems += _violations(check, planned)
    return problems


def checkpoint_problems(run_dir: Path, planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation for each checkpoint of a run directory that is not whole, or is of another job.

    All files are read. Data are compared by the workers, which open them.
    """
    for _, path in generations(run_dir / CHECKPOINTS):
        try:
            verify(path)
            refuse_differences(job_of(planned.run, planned.plan), job_of_state(read_state(path)), str(path))
        except (RunError, OSError) as error:
            yield Violation("checkpoints", str(error))
        except InputError as error:
            yield from error.violations


def _violations(check: Callable[[PlannedJob], None], planned: PlannedJob) -> list[Violation]:
    try:
        check(planned)
    except InputError as error:
        return list(error.violations)
    return []


def _modules(planned: PlannedJob) -> None:
    """Refuse what is in the program itself, such as a notebook: no other process can import it."""
    run = planned.run
    named = {"model.build": run.model.build, "task.kind": run.task.kind, "optimizer.name": run.optimizer.name}
    problems = [
        Violation(where, f"{name!r}: ranks are other processes; put it into a file", "mymodule:build")
        for where, name in named.items()
        if (name or "").startswith("__main__:")
    ]
    if problems:
        raise InputError(problems)


def _loggers(planned: PlannedJob) -> None:
    require_loggers(planned.run.report.log)


def _tokenizer(planned: PlannedJob) -> None:
    kind = planned.run.task.kind
    model = planned.problem.model
    if is_language(kind) and model.family == FAMILY and model.unit != "tokens":
        problem = f"{kind!r} gives tokens, and {model.name} reads {model.unit}"
        near = "image-classification" if model.reads_images else "package.module:Task"
        raise InputError(Violation("task.kind", problem, near))
    if is_language(kind):
        tokenizer = get_tokenizer(tokenizer_name(planned.run))
        require_classes(tokenizer, model.vocabulary, masked=kind == _MASKED)


def _data(planned: PlannedJob) -> None:
    task = planned.run.task
    if ":" in task.kind:
        task_class(task.kind)
    elif task.kind == CHAT:
        require_chats(only_source(task.data), get_tokenizer(tokenizer_name(planned.run)))
    elif is_language(task.kind):
        for source in sources_of(task.data):
            if (name := indexed_name(source)) is not None:
                vocabulary = get_tokenizer(tokenizer_name(planned.run)).vocabulary
                open_indexed(name).require_vocabulary(vocabulary, source)
            else:
                open_texts(source, weft_home() / "cache")
    elif task.kind in DRAWN:
        require_synthetic(task.data)
    elif task.kind == "image-classification":
        # Its library of images comes with torch.
        from weft.training.data.images import list_pictures

        list_pictures(only_source(task.data), planned.problem.model.vocabulary)


def _weights(planned: PlannedJob) -> None:
    table = planned.run.model
    if table.weights:
        path = Path(table.hf or "")
        weight_files(path if path.is_dir() else path.parent)


def _checkpoint_folder(planned: PlannedJob) -> None:
    """Refuse a place for checkpoints that this machine cannot write to or reach; make nothing."""
    table = planned.run.checkpoint
    if table.url is not None:
        RemoteStorage(table.url).require_reachable()
    if (folder := table.folder) is None:
        return
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there}: {'cannot be written' if there.is_dir() else 'is not a folder'}"
        raise InputError(Violation("checkpoint.directory", problem))
