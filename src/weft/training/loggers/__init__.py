"""Loggers: further outputs of a run's figures, not only its own files. It does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.describe.loggers import needs_of, wandb_module
from weft.describe.plan import precision_words, shared_out
from weft.errors import InputError, Violation
from weft.planning.planned_job import PlannedJob
from weft.training.directory.run_directory import RunDirectory
from weft.training.loggers.csv import CsvLogger
from weft.training.loggers.feed import Feed, Feeds, Logger, Opening
from weft.training.loggers.tensorboard import TensorBoardLogger
from weft.training.loggers.trackio import TrackioLogger
from weft.training.loggers.wandb import WandbLogger


def _open_telemetry(opening: Opening) -> Logger:
    # The module needs packages that other loggers do without.
    from weft.training.loggers.opentelemetry import OpenTelemetryLogger

    return OpenTelemetryLogger(opening)


# Fields of a plan that its summary repeats.
_PLAIN = (*("plan_id", "model", "cluster", "ranks", "global_batch", "micro_batch_size", "sequence"),)
LOGGERS: Mapping[str, Callable[[Opening], Logger]] = {
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "trackio": TrackioLogger,
    "opentelemetry": _open_telemetry,
}


def require_loggers(names: Sequence[str]) -> None:
    """Refuse loggers with packages that are not installed; import none of them.

    Raises:
        InputError: one line for each logger, with the remedy.
    """
    problems = []
    for name in names:
        needs = needs_of(name)
        if needs.modules and not any(_installed(module) for module in needs.modules):
            either = " or ".join(needs.modules)
            problem = f"{name!r} needs the package {either}, which is not installed: {needs.remedy}"
            problems.append(Violation("report.log", problem))
    if problems:
        raise InputError(problems)


def open_feeds(job: PlannedJob, run_dir: Path, first_step: int, on_event: Callable[..., None]) -> Feeds:
    """Start the loggers of a run; `first_step` is the step at which it begins or resumes.

    Args:
        on_event: takes the name and the details of an event, for a logger's problems.
    """
    names = job.run.report.log
    if not names:
        return Feeds()
    constants = {"predicted_step_s": job.prediction.step_s}
    records = RunDirectory(run_dir)
    opening = Opening(
        run_dir=run_dir,
        first_step=first_step,
        steps=tuple({**row, **constants} for row in records.metrics() if row["step"] < first_step),
        held_out=tuple(row for row in records.held_out() if row["step"] <= first_step and first_step),
        config=config_of(job),
    )

    def on_problem(logger: str, problem: str) -> None:
        on_event("logger", logger=logger, problem=problem)

    feeds = [Feed(name, partial(_maker(name), opening)) for name in names]
    return Feeds(feeds, constants, on_problem=on_problem)


def config_of(job: PlannedJob) -> dict[str, Any]:
    """Return the run file with every default, and the plan in short."""
    plan, prediction = job.plan, job.prediction
    summary: dict[str, Any] = {
        **{name: getattr(plan, name) for name in _PLAIN},
        "mesh": dict(plan.mesh),
        "stages": len(plan.stages),
        "schedule": plan.schedule.name,
        "precision": precision_words(plan),
        "sharding": shared_out(plan),
        "predicted_step_s": prediction.step_s,
        "predicted_peak_bytes": max(prediction.peak_bytes),
    }
    return {"run": job.run.model_dump(mode="json", exclude_none=True), "plan": summary}


def _maker(name: str) -> Callable[[Opening], Logger]:
    module = wandb_module(name)
    return partial(WandbLogger, module) if module is not None else LOGGERS[name]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds the module
        return False
