"""Changes of the plan while a run trains: rank 0 finds them in the measured steps, and all ranks follow."""

from __future__ import annotations

from typing import Any

from weft.describe.plan_file import parse_plan_file
from weft.errors import RunError
from weft.planning.measured_changes import Decision, MeasuredChange, changes_of
from weft.planning.planned import changed_to
from weft.planning.planned_job import PlannedJob
from weft.run.record.recorder import collect_timeline
from weft.timeline.critical_path import MOST_CYCLES
from weft.training.coordination.agreement import from_first_rank, together
from weft.training.directory.run_directory import RunDirectory
from weft.training.open_run import OpenRun

# Fewer steps than these say too little.
LEAST_MEASURED = 2


class PlanChanges:
    """The points at which a run may change its plan; every rank makes one, and asks after the same steps.

    `begun` is the number of steps before those of this plan.
    """

    def __init__(self, run: OpenRun, begun: int) -> None:
        self._run, self._begun = run, begun
        self._due = dict.fromkeys(changes_of(run.job.plan), False)

    def after(self, done: int, *, waits: bool = False) -> PlannedJob | None:
        """Return the job with the plan that takes over, if a decision is due and finds one.

        It is due at the end of a cycle, when enough steps are measured.

        Args:
            waits: work is under way that another plan would leave out.

        Raises:
            InputError, RunError: on every rank, if rank 0 cannot decide.
        """
        for change in self._due:
            self._due[change] |= done % change.every(self._run.job.plan) == 0 and done > self._begun
        if waits or done % self._run.program.steps_per_cycle:
            return None
        for change, due in self._due.items():
            if due and (steps := self._measured(change, done)):
                self._due[change] = False
                if (job := self._changed(change, done, steps)) is not None:
                    return job
        return None

    def _measured(self, change: MeasuredChange, done: int) -> range:
        """Return the steps that a decision sees; none if they are too few."""
        cycle = self._run.program.steps_per_cycle
        first = change.first_step(self._begun, cycle)
        if done < first + change.cycles * cycle:
            return range(0)
        # Rings of slots may not have the end of the last step yet.
        steps = range(max(first, done - MOST_CYCLES * cycle), done - 1)
        return steps if len(steps) >= LEAST_MEASURED else range(0)

    def _changed(self, change: MeasuredChange, done: int, steps: range) -> PlannedJob | None:
        told: dict[str, Any] | None = None
        with together():
            if self._run.runtime.rank == 0 and (found := self._decided(change, steps)) is not None:
                plan = None if found.plan is None else found.plan.record()
                told = {"event": found.event, "words": dict(found.words), "plan": plan}
        told = from_first_rank(told)
        if told is None:
            return None
        self._run.journal.event(told["event"], step=done, **told["words"])
        if told["plan"] is None:
            return None
        job = changed_to(self._run.job, parse_plan_file(told["plan"]).plan, None)
        with together():
            if self._run.runtime.rank == 0:
                RunDirectory(self._run.directory.path).prepare_turn(job)
        return job

    def _decided(self, change: MeasuredChange, steps: range) -> Decision | None:
        job, directory = self._run.job, self._run.directory
        try:
            measured = collect_timeline(
                directory.path, job.program, job.plan.plan_id, directory.name, steps=steps
            )
        except RunError as error:
            return Decision(event=change.unmeasured, words={"reason": str(error)})
        return change.decide(job, measured)
