"""Lessons from finished runs and trials, for later predictions of the same model on the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.files import weft_home
from weft.planning.planned_job import PlannedJob
from weft.planning.residuals import Lesson, learn, measured_peaks, observe
from weft.timeline.compare import WARM_UP_STEPS
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import reopen
from weft.training.trials import STEPS, Trial


def learn_from_trials(planned: PlannedJob, trials: Sequence[Trial]) -> Lesson | None:
    """Add the observations of complete trials to the measured steps of the model on this machine.

    Returns:
        The lesson; None if no instructions were measured.

    Raises:
        InputError: if the file of measured steps is broken or cannot be written.
    """
    ends = [one.observation for one in trials if one.steps == STEPS and one.observation is not None]
    return learn(planned, ends, weft_home()) if ends else None


def learn_from_run(path: Path, home: Path) -> Lesson:
    """Add a finished run, with its end time, to the measured steps of its model on its cluster.

    Raises:
        InputError: if `path` is not a run directory, or a file is broken or cannot be written.
        RunError: if the run has not finished.
    """
    directory = RunDirectory(path)
    job = reopen(path)
    summary, measured = directory.summary(), directory.measured()
    steps = int(measured.step.max()) - int(measured.step.min()) + 1
    observation = observe(
        job,
        measured,
        step_s=float(summary["measured_step_s"]),
        warm_up=min(WARM_UP_STEPS, steps - 1),
        time_s=(path / "summary.json").stat().st_mtime,
        peak_bytes=measured_peaks(summary),
    )
    return learn(job, [observation], home)
