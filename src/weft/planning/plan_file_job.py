"""The planned job of a plan file, also for another model or cluster than its own."""

from __future__ import annotations

from pathlib import Path

from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile, load_plan_file
from weft.describe.plan_subject import PlanSubject, subject_of
from weft.describe.run_file import run_of_keywords
from weft.errors import InputError, Violation
from weft.planning.planned import moved, planned_for
from weft.planning.planned_job import PlannedJob


def plan_file_job(path: Path, *, model: str | None = None, on: str | None = None) -> PlannedJob:
    """Return the job of a plan file, or of its plan for another model or cluster.

    A plan file without its subject names a preset and a cluster.

    Raises:
        InputError: when they cannot be found, or the plan is not for them.
    """
    file = load_plan_file(path)
    if file.subject is None:
        file = file._replace(subject=_named_subject(path, file.plan, model, on))
    return moved_job(file, model, on)


def moved_job(file: PlanFile, model: str | None, on: str | None) -> PlannedJob:
    """Return the job of a plan with its subject, or of the plan for another model or cluster.

    Raises:
        InputError: when they cannot be found, or the plan is not for them.
    """
    subject = file.subject
    assert subject is not None, "a plan without a subject got one by its names"
    if model is None and on is None:
        return planned_for(subject, file.plan, file.prediction)
    return moved(subject.pinned(file.plan).changed(model=model, on=on), file.plan)


def _named_subject(path: Path, plan: Plan, model: str | None, on: str | None) -> PlanSubject:
    """Return the subject that the plan's names mean, or the given names."""
    try:
        run = run_of_keywords(
            model=model or plan.model,
            on=on or plan.cluster,
            global_batch=plan.global_batch,
            sequence=plan.sequence,
            precision=plan.precision,
            pins={},
        )
        return subject_of(run)
    except InputError as error:
        problem = "has no key 'subject', and its names are unknown here; give --model and --on"
        raise InputError([Violation(str(path), problem), *error.violations]) from None
