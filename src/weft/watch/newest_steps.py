"""The newest recorded steps of a run, beside the prediction for them, also while its ranks run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.describe.plan_versions import former_ids
from weft.errors import InputError, RunError
from weft.program.program import NONE, Program
from weft.run.record.recorder import collect_timeline
from weft.run.record.slots import read_pulse, slots_path
from weft.timeline.compare import Comparison, compare
from weft.timeline.timeline import Timeline, under_current_id
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import reopen

# Steps whose medians tell which instructions are late, and the most records that are read for them.
STEPS = 20
MAXIMUM_RECORDS = 200_000
# A look is repeated after this time, and takes at most a tenth of the time.
LOOK_INTERVAL_S = 2.0
PAUSE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestStep:
    """The newest whole step of a run.

    Attributes:
        measured: the rows of this step only.
        comparison: the prediction with the medians of up to `STEPS` newest steps.
    """

    step: int
    predicted: Timeline
    measured: Timeline
    comparison: Comparison


class StepsOfPlan:
    """The recorded steps of one plan of a run. The program is compiled once, at the first look.

    Raises:
        InputError: if the run directory names what cannot be found here, or its files are broken.
    """

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory(path)
        self.job = reopen(path)
        self._predicted = under_current_id(self._directory.predicted(), self.job.plan)
        self._found: NewestStep | None = None
        self._next_look_s = 0.0

    def newest(self) -> NewestStep | None:
        """Return the newest whole step that all ranks have recorded; None before the first one.

        Looks that follow each other closely return the same step.
        """
        begun_s = time.monotonic()
        if begun_s >= self._next_look_s:
            self._found = self._look() or self._found
            now_s = time.monotonic()
            self._next_look_s = now_s + max(LOOK_INTERVAL_S, PAUSE * (now_s - begun_s))
        return self._found

    def _look(self) -> NewestStep | None:
        job, path = self.job, self._directory.path
        pulses = [read_pulse(slots_path(path, rank)) for rank in range(job.plan.ranks)]
        begun = [pulse for pulse in pulses if pulse is not None and pulse.steps_begun]
        if len(begun) < len(pulses):
            return None
        last, first = min(one.step for one in begun), max(one.step - one.steps_begun + 1 for one in begun)
        count = max(1, min(STEPS, MAXIMUM_RECORDS // max(1, len(job.program))))
        steps = range(max(first, last - count), last + 1)
        if self._found is not None and self._found.step == last:
            return None
        try:
            recorded = collect_timeline(
                path,
                job.program,
                job.plan.plan_id,
                self._directory.name,
                former_ids=former_ids(job.plan),
                steps=steps,
            )
        except RunError:
            return None  # slots of another plan, or of a start that has recorded nothing yet
        whole = whole_steps(under_current_id(recorded, job.plan), job.program)
        if not len(whole):
            return None
        step = int(whole.step.max())
        # The first step of a start loads and compiles.
        settled = whole.take(whole.step > first) if step > first else whole
        try:
            comparison = compare(self._predicted, settled, warm_up=0)
        except InputError:
            return None
        measured = whole.take(whole.step == step)
        return NewestStep(step=step, predicted=self._predicted, measured=measured, comparison=comparison)


def whole_steps(timeline: Timeline, program: Program) -> Timeline:
    """Return the rows of the steps in which every instruction of the program has ended."""
    cycle = program.steps_per_cycle
    iteration = program.columns.iteration
    wanted = np.bincount(iteration[iteration != NONE], minlength=cycle)
    steps, index, count = np.unique(timeline.step, return_inverse=True, return_counts=True)
    return timeline.take((count == wanted[steps % cycle])[index])


def late_ranks(comparison: Comparison, most: int) -> Mapping[int, float]:
    """Return the ranks with the largest differences, ascending, each with its late seconds of a step.

    Args:
        most: the number of ranks.
    """
    late: dict[int, float] = {}
    for pair in comparison.ranks:
        late[pair.rank] = late.get(pair.rank, 0.0) + pair.measured_s - pair.predicted_s
    latest = sorted(late, key=lambda rank: (-abs(late[rank]), rank))[:most]
    return {rank: late[rank] for rank in sorted(latest)}
