"""Trials: short trainings of the best plans on this machine, to find the fastest one by measurement.

Each trial is a separate run in fresh processes and a temporary run directory. So no trial slows the next one.
Its first step is dropped. More than four plans are screened by successive halving (Jamieson and Talwalkar,
arXiv 1502.07943). All train a few steps, and the faster half goes on, until four are left. These train ten
steps. A plan that does not run is also a result.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import CheckpointTable, ReportTable
from weft.describe.this_machine import THIS_MACHINE
from weft.errors import InputError, RunError, Violation
from weft.planning.planned import decided_file
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate
from weft.planning.residuals import measured_peaks, observe
from weft.predict.corrections import Observation
from weft.predict.ledger import Ledger
from weft.run.launch.workers import launch_workers
from weft.run.record.recorder import collect_timeline
from weft.timeline.medians import typical_step_s
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import WORKER_MODULE, enter_prediction, prepare

STEPS, SCREENING_STEPS = 10, 4
FINALISTS = 4
_OUT_OF_MEMORY = ("out of memory", "outofmemory", "memoryerror", "can't allocate memory")


class TrialOutcome(StrEnum):
    """The outcome of a trial."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plan trained for `steps` steps.

    `seconds`: of each step but the first; `reason`: the problem if there are none. `cycle`: the number of
    different steps in a program. `observation`: the measured errors of the plan's prediction, or None.
    """

    candidate: Candidate
    outcome: TrialOutcome
    steps: int
    seconds: tuple[float, ...] = ()
    cycle: int = 1
    reason: str = ""
    observation: Observation | None = None

    @property
    def step_s(self) -> float | None:
        """The median step, or the mean of the medians of a cycle's steps; None if the plan did not run."""
        if not self.seconds:
            return None
        return typical_step_s(range(1, 1 + len(self.seconds)), self.seconds, self.cycle)

    @property
    def spread(self) -> float | None:
        """Half of the longest minus the shortest step, over the median."""
        if self.step_s is None:
            return None
        return (max(self.seconds) - min(self.seconds)) / (2.0 * self.step_s)


Train = Callable[[PlannedJob, Candidate, int], Trial]


def require_this_machine(run: RunFile, count: int) -> None:
    """Refuse trials of plans for another cluster, and trials of no plan.

    Raises:
        InputError: one line.
    """
    if run.cluster.use != THIS_MACHINE:
        problem = f"trains on this machine, and the plans are for {run.cluster.use}"
        raise InputError(Violation("--measure", problem, f"--on {THIS_MACHINE}"))
    if count < 1:
        raise InputError(Violation("--measure", f"{count} plans; at least one is trained", "1"))


def measure_best(planned: PlannedJob, count: int, train: Train | None = None) -> tuple[Trial, ...]:
    """Train the best `count` plans that fit; return the trials, fastest first, failed ones last.

    Plans that screening dropped come after all plans that trained to the end. The ledger gets the predictions
    and measurements of the latter.

    Args:
        planned: a job with a plan that was searched for.
        train: the function that makes one trial; default: `trial`.

    Raises:
        InputError: if the plans are not for this machine.
        RunError: if none of the plans ran.
    """
    require_this_machine(planned.run, count)
    make = train or trial
    left = list(planned.searched.fitting[:count])
    dropped: list[Trial] = []
    while len(left) > FINALISTS:
        screened = sorted((make(planned, one, SCREENING_STEPS) for one in left), key=_order)
        keep = max(FINALISTS, -(-len(left) // 2))
        onward = [one for one in screened[:keep] if one.seconds]
        dropped += [one for one in screened if one not in onward]
        left = [one.candidate for one in onward]
    finals = [make(planned, one, STEPS) for one in left]
    _enter(planned, finals)
    trials = sorted([*finals, *dropped], key=lambda one: (not one.seconds, -one.steps, *_order(one)[1:]))
    if not trials[0].seconds:
        first = trials[0]
        raise RunError(f"none of the {len(trials)} best plans ran; {first.candidate.words}: {first.reason}")
    return tuple(trials)


def trial(planned: PlannedJob, candidate: Candidate, steps: int) -> Trial:
    """Train one plan in fresh processes on this machine; return failures and do not raise them."""
    job = job_of_trial(planned, candidate, steps)
    with tempfile.TemporaryDirectory(prefix="weft-trial-") as folder:
        path = Path(folder) / "run"
        try:
            with prepare(job, path) as directory:
                launch_workers(path, job.plan.ranks, WORKER_MODULE)
            return _measured(job, candidate, directory)
        except InputError as error:
            return _without_steps(candidate, steps, TrialOutcome.REFUSED, str(error.violations[0]))
        except RunError as error:
            # The log that the message names is gone with the folder.
            reason = str(error).partition(" (log: ")[0]
            logged = reason.lower()
            ran_out = any(word in logged for word in _OUT_OF_MEMORY)
            outcome = TrialOutcome.OUT_OF_MEMORY if ran_out else TrialOutcome.FAILED
            return _without_steps(candidate, steps, outcome, reason)


def job_of_trial(planned: PlannedJob, candidate: Candidate, steps: int) -> PlannedJob:
    """Return the job with another of its plans, `steps` steps, one checkpoint at the end and no loggers."""
    run = planned.run
    plan, prediction, _ = decided_file(run, planned.problem, candidate)
    short = run.model_copy(
        update={
            "train": run.train.model_copy(update={"steps": steps}),
            "checkpoint": CheckpointTable(every=steps, keep=1),
            "report": ReportTable(),
        }
    )
    return PlannedJob(run=short, problem=planned.problem, plan=plan, chosen_for=prediction)


def _measured(job: PlannedJob, candidate: Candidate, directory: RunDirectory) -> Trial:
    steps = job.run.train.steps
    seconds = tuple(row["step_s"] for row in directory.metrics()[1:])
    if not seconds:
        return _without_steps(candidate, steps, TrialOutcome.FAILED, "no step was taken after the first one")
    measured = collect_timeline(directory.path, job.program, job.plan.plan_id, directory.name)
    made = Trial(
        candidate=candidate,
        outcome=TrialOutcome.MEASURED,
        steps=steps,
        seconds=seconds,
        cycle=job.program.steps_per_cycle,
    )
    assert made.step_s is not None, "there are seconds"
    observation = observe(
        job,
        measured,
        step_s=made.step_s,
        warm_up=1,
        time_s=time.time(),
        peak_bytes=measured_peaks(directory.result()),
    )
    return replace(made, observation=observation)


def _without_steps(candidate: Candidate, steps: int, outcome: TrialOutcome, reason: str) -> Trial:
    return Trial(candidate=candidate, outcome=outcome, steps=steps, reason=reason)


def _order(one: Trial) -> tuple[bool, float]:
    return (one.step_s is None, one.step_s or 0.0)


def _enter(planned: PlannedJob, trials: Sequence[Trial]) -> None:
    with Ledger() as ledger:
        for one in trials:
            if one.step_s is not None:
                job = job_of_trial(planned, one.candidate, one.steps)
                ledger.score(enter_prediction(job, ledger), one.step_s)
