"""Jobs of plan files, which name a model and a cluster."""

from __future__ import annotations

from pathlib import Path

from weft.describe.plan_file import load_plan_file
from weft.describe.run_file import load_run, run_of_keywords
from weft.errors import InputError
from weft.planning.planned import PlannedJob, given_plan


def plan_file_job(path: Path) -> PlannedJob:
    """Return the job of a plan file.

    Model and cluster come from a matching run file next to it, else from the names in the plan.

    Raises:
        InputError: when they cannot be found, or the plan is not for them.
    """
    plan, prediction = load_plan_file(path)

    def by_names() -> PlannedJob:
        run = run_of_keywords(
            model=plan.model,
            on=plan.cluster,
            global_batch=plan.global_batch,
            sequence=plan.sequence,
            precision=plan.precision,
            pins={},
        )
        return given_plan(run, plan, prediction)

    beside = path.parent / "run.toml"
    if not beside.exists():
        return by_names()
    try:
        return given_plan(load_run(beside), plan, prediction)
    except InputError as refused:
        try:
            return by_names()
        except InputError:
            raise refused from None
