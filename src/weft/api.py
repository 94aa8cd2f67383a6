"""The Python interface of weft: `plan`, `train` and their results. Importing it does not import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from weft.describe.layout import Pins
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.plan_file import is_plan_file
from weft.describe.prediction import Prediction
from weft.describe.run_file import asked_run
from weft.describe.units import counted, format_seconds, shown
from weft.destinations import require_file, require_folder
from weft.errors import InputError, Violation
from weft.installed import require_no_import
from weft.moves.layout import flops_per_layer
from weft.moves.layout_of_plan import layout_of
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate
from weft.progress import ProgressReport, unwatched
from weft.run.launch.workers import require_torch
from weft.timeline.compare import Comparison
from weft.timeline.timeline import Timeline
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import evaluate as evaluate_run
from weft.training.session import execute, finish, job_in, job_to_train, last_job, prepare, reopen, source_at
from weft.web.pages.plan import plan_html
from weft.web.pages.report import write_run_report
from weft.web.rows.plan import stage_rows

PLANNED = ", or the result of weft.plan"
WORDS: Mapping[str, str] = {"model": "gpt2 or mymodule:build", "on": "8xt4", "data": "python-stdlib"}


class PlanPins(Pins, total=False):
    """The run file's `[plan]` table as keyword arguments."""

    planner: str | None


@dataclass(frozen=True)
class Planned:
    """A planned job. A notebook displays its stages, memory and predicted step."""

    job: PlannedJob

    def __repr__(self) -> str:
        return one_line(self, str(self.job))

    @property
    def plan(self) -> Plan:
        """The plan's decisions."""
        return self.job.plan

    @property
    def prediction(self) -> Prediction:
        """The prediction for a step of the plan."""
        return self.job.prediction

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All layouts that the planner evaluated, best first; empty when the plan was given."""
        return self.job.ranking.candidates if self.job.ranking is not None else ()

    def simulate(self) -> Timeline:
        """Predict one step in the steady state; times are in nanoseconds."""
        return self.job.predicted.simulation.timeline

    def save(self, path: str | Path) -> Path:
        """Write the plan file and return its path.

        Raises:
            weft.errors.InputError: when no file can be written there.
        """
        path = _path(path, "path")
        require_file(path)
        path.write_text(self.job.file.to_json())
        return path

    def _repr_html_(self) -> str:
        job = self.job.problem.job
        layout = layout_of(self.plan, flops_per_layer(job))
        title = f"{self.plan.model} on {self.plan.cluster}: {layout}"
        stages = stage_rows(self.plan, self.prediction, job.cluster, job.graph.layers)
        return plan_html(self.plan, self.prediction, stages, self.simulate(), title=title)


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, its summary, and its predictions compared with measurements."""

    directory: Path
    summary: Mapping[str, Any]

    def __repr__(self) -> str:
        step, loss = self.summary["measured_step_s"], self.summary["final_loss"]
        done = f"{counted(self.summary['steps'], 'step')} of {format_seconds(step)}"
        return one_line(self, f"{self.directory}: {done}, held-out loss {loss:.4g}")

    def compare(self) -> Comparison:
        """Compare predictions with measurements, instruction by instruction."""
        return RunDirectory(self.directory).compare()


def plan(
    source: str | Path | None = None,
    *,
    model: str | Path | None = None,
    on: str | Path | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    **pins: Unpack[PlanPins],
) -> Planned:
    """Find the best plan for a run file, or for a model on a cluster.

    Args:
        source: path of a RUN.toml, whose keys the other arguments replace; or a model, as in `model`.
        model: a preset, a folder with a `config.json`, such a file, or a function as `mymodule:build`.
        on: `this-machine`, the default without a RUN.toml; an expression such as `64xa100-80gb`; or the path
            of a CLUSTER.toml.
        global_batch: samples per optimizer step.
        sequence: tokens per sample.
        precision: of the computations, such as `bf16`, or `any`.
        pins: keys of the run file's [plan] table: decisions of the layout, such as `pp`, and `planner`.

    Returns:
        The best plan, its prediction and all candidates.

    Raises:
        weft.errors.InputError: when the input is invalid or no plan fits.
    """
    require_no_import("weft.plan")
    path = None if source is None else _path(source, "source")
    if path is not None and is_plan_file(path):
        raise InputError(Violation("source", f"{path} is a plan; weft.simulate and weft.train take it"))
    run = asked_run(
        None if path is None else str(path),
        model=_word(model, "model"),
        on=_word(on, "on"),
        global_batch=global_batch,
        sequence=sequence,
        precision=precision,
        pins=pins,
    )
    return Planned(plan_run(run))


def simulate(
    source: Planned | str | Path, *, model: str | Path | None = None, on: str | Path | None = None
) -> Timeline:
    """Predict one step of a plan in the steady state.

    Args:
        source: the result of `plan`, the path of a run file or a plan file, or a run directory.
        model, on: another model and cluster for the path's plan, as in `plan`.

    Returns:
        One row per instruction and rank; times in nanoseconds from the start of the step.

    Raises:
        weft.errors.InputError: when `source` is invalid, a named file does not exist, or no plan fits.
    """
    model, on = _other(source, model, "model"), _other(source, on, "on")
    if isinstance(source, Planned):
        return source.simulate()
    return Planned(job_in(_path(source, "source", PLANNED), model=model, on=on)).simulate()


def train(
    source: Planned | str | Path,
    *,
    model: str | Path | None = None,
    on: str | Path | None = None,
    data: str | Path | None = None,
    steps: int | None = None,
    directory: str | Path | None = None,
    resume: str | Path | None = None,
    on_poll: Callable[[RunDirectory], None] | None = None,
) -> Run:
    """Train on local ranks and return the finished run; at once if all its steps are done.

    Args:
        source: the result of `plan`, the path of a RUN.toml or PLAN.json, or a run directory to resume, or
            the URL to which its checkpoints were copied.
        model, on: another model and cluster for the path's job, as in `plan`.
        data, steps: override the run file's `[task] data` and `[train] steps`.
        directory: the run directory to write; default: a fresh one under `runs/`.
        resume: a run directory, or URL, to continue under the plan of `source` for the same job.
        on_poll: called several times a second while the workers run. If it raises KeyboardInterrupt, the run
            saves a checkpoint and stops, and the exception goes on.

    Returns:
        The run, with its directory, its summary and its comparison with the prediction.

    Raises:
        weft.errors.InputError: when the input is invalid; no worker has started then.
        weft.errors.RunError: when the run failed.
    """
    require_no_import("weft.train")
    require_torch()
    if on_poll is not None and not callable(on_poll):
        raise InputError(Violation("on_poll", f"{shown(on_poll)}: must be a function"))
    planned, path = job_to_train(
        source.job if isinstance(source, Planned) else _source(source, "source", PLANNED),
        model=_other(source, model, "model"),
        on=_other(source, on, "on"),
        data=_word(data, "data"),
        steps=steps,
        directory=None if directory is None else _path(directory, "directory"),
        resume=None if resume is None else _source(resume, "resume"),
    )
    return train_in(planned, path, on_poll)


def train_in(planned: PlannedJob, path: Path, on_poll: Callable[[RunDirectory], None] | None = None) -> Run:
    """Train a planned job in a run directory; `on_poll` is as in `train`.

    Raises:
        InputError: when the job is refused; no worker has started then.
        RunError: when the run failed.
    """
    if RunDirectory(path).is_done(planned):
        return Run(path, RunDirectory(path).summary())
    with prepare(planned, path) as run_directory:
        summary = execute(planned, run_directory, (lambda: on_poll(run_directory)) if on_poll else None)
        write_run_report(run_directory, last_job(planned, run_directory))
    return Run(run_directory.path, summary)


def evaluate(directory: str | Path, *, report: ProgressReport = unwatched) -> Mapping[str, Any]:
    """Evaluate a run's newest checkpoint on held-out data, on local ranks and with the run's plan.

    Held-out samples that fill whole global batches count once each; the rest is left out.

    Args:
        directory: a run directory.
        report: called with the finished batches and all of them.

    Returns:
        `step` of the checkpoint, `samples`, `loss` in nats per target, `perplexity` of a language model, and
        the task's metrics, such as `accuracy`. `evaluation.json` holds the same record.

    Raises:
        InputError: when `directory` is not a run directory or has no checkpoint.
        RunError: when a rank failed.
    """
    require_torch()
    run_directory = RunDirectory(_path(directory, "directory"))
    run_directory.require()
    require_folder(run_directory.path)
    return evaluate_run(reopen(run_directory.path), run_directory, report)


def finished(path: str | Path) -> Run:
    """Return the finished run of a directory; merge the workers' files unless weft's launcher has done so.

    Raises:
        InputError: when `path` is not a run directory.
        RunError: when the run has not finished.
    """
    directory = RunDirectory(_path(path, "path"))
    directory.require()
    if not (directory.path / "summary.json").exists():
        planned = reopen(directory.path)
        finish(planned, directory)
        write_run_report(directory, planned)
    return Run(directory.path, directory.summary())


def _path(value: str | Path, name: str, other: str = "") -> Path:
    """Return a path; a message names the `other` things that may be given."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(Violation(name, f"{shown(value)}: must be a path{other}"))
    return Path(value)


def _source(value: str | Path, name: str, other: str = "") -> Path:
    """Return the local path of a path or a URL."""
    _path(value, name, other)
    return source_at(value)


def _word(value: str | Path | None, name: str) -> str | None:
    """Return a name or a path as text."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise InputError(Violation(name, f"{shown(value)}: must be a name or a path", WORDS[name]))
    return os.fspath(value)


def _other(source: object, value: str | Path | None, name: str) -> str | None:
    """Return another model or cluster for a path's job; a planned job has its own."""
    if value is not None and isinstance(source, Planned):
        raise InputError(Violation(name, "a planned job has its own; plan again", "weft.plan"))
    return _word(value, name)
