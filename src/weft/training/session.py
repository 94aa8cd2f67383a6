"""The launcher's side of a run from plan to summary: prepare, launch, merge, score; without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.describe.plan_file import load_plan_file
from weft.describe.reading import holds_json
from weft.describe.run_file import RunFile, changed, load_run, naming
from weft.destinations import require_folder
from weft.errors import InputError, RunError, Violation
from weft.lab.inside import require_lab_devices
from weft.planning.elastic import plans_at_hand
from weft.planning.lost_replicas import LEAST, goes_on, ranks_of_replicas
from weft.planning.measured_changes import changes_of
from weft.planning.plan_file_job import moved_job, plan_file_job
from weft.planning.planned import plan_run, planned_for, taking_over
from weft.planning.planned_job import PlannedJob
from weft.predict.ledger import STEP, Ledger
from weft.progress import ProgressReport, progress_file, unwatched
from weft.run.launch.rolls import Replicas
from weft.run.launch.workers import launch_workers
from weft.training.coordination.hang import HangWatch
from weft.training.directory.plans_at_hand import keep_at_hand
from weft.training.directory.remote_run import bring_run
from weft.training.directory.resuming import (
    as_in,
    kept_if_refused,
    removed_if_refused,
    require_job_of,
    require_not_started,
)
from weft.training.directory.run_directory import RunDirectory, fresh_directory
from weft.training.directory.run_lock import only_run
from weft.training.directory.verified import write_verified
from weft.training.refusals import refusals

WORKER_MODULE = "weft.training.worker"
EVALUATION_MODULE = "weft.training.evaluation.worker"
DEFAULT_RUNS = Path("runs")

# A search for the best plan of a run file, as `plan_run`.
PlanBy = Callable[[RunFile], PlannedJob]


def source_at(source: str | Path) -> Path:
    """Return the path of a job or a run; a run behind a URL first comes to `runs/` here.

    Raises:
        InputError, RunError: as `bring_run`.
    """
    return bring_run(str(source), DEFAULT_RUNS) if "://" in str(source) else Path(source)


def job_to_train(
    source: PlannedJob | Path,
    *,
    model: str | None = None,
    on: str | None = None,
    data: str | None = None,
    steps: int | None = None,
    directory: Path | None = None,
    resume: Path | None = None,
    plan_by: PlanBy = plan_run,
) -> tuple[PlannedJob, Path]:
    """Return the job that a start trains, and the path of its run directory; nothing is written.

    The arguments are those of `weft.train`; `plan_by` searches the plan of a run file.

    Raises:
        InputError: when they do not go together, name no job, or the directory cannot have the run.
    """
    former = source if isinstance(source, Path) and source.is_dir() else None
    if former is not None:
        given = {"resume": resume, "directory": directory, "model": model, "on": on}
        if wrong := [f"--{name}" for name, value in given.items() if value is not None]:
            problem = f"a run directory; {', '.join(wrong)} goes with a run file or a plan file"
            raise InputError(Violation(str(source), problem, "RUN.toml"))
    if resume is not None and directory is not None:
        problem = f"the run goes on in {resume}; give one of directory and resume"
        raise InputError(Violation("directory", problem))
    if resume is not None:
        RunDirectory(resume).require()
    path = former or resume or directory
    require_folder(path or DEFAULT_RUNS)
    filling = plan_by if resume is None else lambda run: plan_by(as_in(run, resume))
    job = source if isinstance(source, PlannedJob) else job_in(source, model=model, on=on, plan_by=filling)
    if resume is not None:
        require_job_of(job.run, job.plan, resume)
    elif directory is not None:
        require_not_started(directory)
    if path is None:
        path = fresh_directory(DEFAULT_RUNS, source.stem if isinstance(source, Path) else job.plan.model)
    run = changed(job.run, {"task": {"data": data}, "train": {"steps": steps}})
    return replace(job, run=run), path


@contextmanager
def prepare(planned: PlannedJob, path: Path, report: ProgressReport = unwatched) -> Iterator[RunDirectory]:
    """Write the run directory of a planned job and lock it during the block.

    If the block is refused, a new directory goes, and the files of a former start come back.

    Args:
        report: gets the number of plans for fewer nodes that are made, of all.

    Raises:
        InputError: with all `refusals` of the job, if there is no plan for the fewest nodes, or if another
            process trains in the directory.
    """
    if problems := refusals(planned):
        raise InputError(problems)
    at_hand = plans_at_hand(planned, report)
    directory = RunDirectory(path)
    with removed_if_refused(path), only_run(path), kept_if_refused(path):
        directory.prepare(planned)
        keep_at_hand(directory, at_hand)
        yield directory


def job_in(
    path: Path, *, model: str | None = None, on: str | None = None, plan_by: PlanBy = plan_run
) -> PlannedJob:
    """Return the planned job of a run file, a plan file or a run directory; plan a run file's job.

    `model` and `on` name others. A run file is planned for them by `plan_by`; a plan is moved to them.

    Raises:
        InputError: if the path is none of these, something it names cannot be found, or no plan fits.
    """
    if path.is_dir():
        job = reopen(path, of_all=True)
        return job if model is None and on is None else moved_job(job.file, model, on)
    if holds_json(path):
        return plan_file_job(path, model=model, on=on)
    return plan_by(naming(load_run(path), model=model, on=on))


def reopen(path: Path, *, of_all: bool = False, ranks: int | None = None) -> PlannedJob:
    """Return the planned job of an existing run directory, to resume or to look at.

    Args:
        of_all: take the plan of all replicas, also while some are lost.
        ranks: take the plan at hand for so many ranks, if there is one.

    Raises:
        InputError: if it is not a run directory or a file in it is broken.
    """
    directory = RunDirectory(path)
    directory.require()
    subject, given = directory.planned(of_all=of_all, ranks=ranks)
    job, run = planned_for(subject, given.plan, given.prediction), subject.run
    if run.plan.then is None or not directory.turns:
        return job
    then = load_plan_file(directory.then / "plan.json")
    return taking_over(job, run.plan.then.at_step, then.plan, then.prediction)


def execute(
    planned: PlannedJob, directory: RunDirectory, on_poll: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Launch the workers, wait, merge their files and return the summary.

    The prediction is entered into the ledger before the run starts and scored when it has ended.

    Raises:
        InputError: if a lab around this process has other devices than the plan.
        RunError: if a worker failed or, with `[report] hang = "stop"`, hangs, and no restart is left; one
            line with its log's path.
        KeyboardInterrupt: if the user stopped the run; the workers have saved a checkpoint.
    """
    require_lab_devices(planned.problem.job.cluster)
    with Ledger() as ledger:
        entry = enter_prediction(planned.all[-1], ledger)
        _launch(planned, directory, on_poll)
        last = last_job(planned, directory)
        if last is not planned.all[-1]:
            # Its steps were predicted before they ran, too.
            entry = enter_prediction(last, ledger)
        summary = directory.finish(last.file, last.program)
        ledger.score(entry, summary["measured_step_s"])
    return summary


def _launch(planned: PlannedJob, directory: RunDirectory, on_poll: Callable[[], None] | None) -> None:
    """Run the workers to the end; after a failure they start again, as often as the run file says."""
    own = ranks_of_replicas(planned.plan) if goes_on(planned) else None
    replicas = None if own is None else Replicas(tuple(own), LEAST)
    for left in range(planned.run.run.max_restarts, -1, -1):
        poll = _watching(planned, directory, on_poll)
        try:
            launch_workers(directory.path, planned.plan.ranks, WORKER_MODULE, poll, replicas=replicas)
            return
        except RunError as error:
            if left == 0:
                raise
            directory.tell("restarted", reason=str(error), left=left - 1)


def last_job(planned: PlannedJob, directory: RunDirectory) -> PlannedJob:
    """Return the job whose plan has ended a run: a run may change its plan by itself."""
    last = planned.all[-1]
    return last if directory.plan().plan_id == last.plan.plan_id else reopen(directory.path)


def _watching(
    planned: PlannedJob, directory: RunDirectory, on_poll: Callable[[], None] | None
) -> Callable[[], None]:
    def watch_of(job: PlannedJob) -> HangWatch:
        step_s = job.prediction.step_s
        return HangWatch(directory, job.program, step_s=step_s, report=planned.run.report)

    watch, later = watch_of(planned), planned.later
    by_itself = bool(changes_of(planned.plan)) or goes_on(planned)
    written = directory.plan_written_ns if by_itself else 0

    def poll() -> None:
        nonlocal watch, later, written
        if on_poll is not None:
            on_poll()
        if later is not None and not directory.turns:
            watch, later = watch_of(later.job), later.job.later
        elif by_itself and written != directory.plan_written_ns:
            written = directory.plan_written_ns
            watch = watch_of(reopen(directory.path))
        watch.look()

    return poll


def evaluate(
    planned: PlannedJob, directory: RunDirectory, report: ProgressReport = unwatched
) -> dict[str, Any]:
    """Launch the plan's ranks to evaluate the newest checkpoint and return `evaluation.json`.

    Raises:
        InputError: if the run has no checkpoint.
        RunError: if a worker failed, in one line with the path of its log.
    """
    write_verified(directory.path, planned)
    with progress_file(directory.path).polled(report) as poll:
        launch_workers(directory.path, planned.plan.ranks, EVALUATION_MODULE, poll)
    return directory.evaluation()


def finish(planned: PlannedJob, directory: RunDirectory) -> dict[str, Any]:
    """Merge and score a finished run that another launcher started, and return the summary.

    Raises:
        RunError: if the run has not finished.
    """
    summary = directory.finish(planned.file, planned.program)
    with Ledger() as ledger:
        ledger.score(enter_prediction(planned, ledger), summary["measured_step_s"])
    return summary


def enter_prediction(planned: PlannedJob, ledger: Ledger) -> int:
    """Enter the job's predicted step time; return the entry's number, for `Ledger.score`."""
    prediction = planned.prediction
    return ledger.record_prediction(
        quantity=STEP,
        subject=planned.plan.plan_id,
        predicted=prediction.step_s,
        low=prediction.step_low_s,
        high=prediction.step_high_s,
        source=prediction.source,
        time_s=time.time(),
    )
