"""Clusters that serve a job better without some of their nodes.

A slow group of nodes may cost a step more than it computes. The cause may be its links, its memory, or a
precision that it lacks. The job is planned again without each group; its global batch stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.describe.one_line import one_line
from weft.describe.run_file import RunFile, changed
from weft.errors import InputError
from weft.planning.goals import goal_value, goal_words
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Planner
from weft.progress import CountedWork, ProgressReport, unwatched

# A smaller gain is within the error of predictions.
LEAST_GAIN = 0.02
# Searches on larger clusters take tens of seconds each.
MOST_DEVICES_SEARCHED = 256


@dataclass(frozen=True, slots=True)
class FewerNodes:
    """The plan without a group of nodes, and how much of the goal's value it saves, as a share."""

    group: str
    planned: PlannedJob
    saved: float

    def __repr__(self) -> str:
        return one_line(self, self.words)

    def record(self) -> dict[str, Any]:
        """Return the group, the plan without it and what it saves, for JSON."""
        return {
            "group": self.group,
            "plan_id": self.planned.plan.plan_id,
            "layout": self.planned.plan.words,
            **self.planned.prediction.step_record,
            "saved": self.saved,
        }

    @property
    def words(self) -> str:
        job = self.planned
        value = goal_words(job.problem, job.prediction, job.plan.ranks)
        options = " ".join(f"--without {word!r}" for word in job.run.cluster.without or ())
        return f"better without {self.group}: {value} in {job.plan.precision} ({-self.saved:.0%}); {options}"


def better_without(
    run: RunFile,
    planned: PlannedJob,
    planner: Planner | None = None,
    report: ProgressReport = unwatched,
) -> FewerNodes | None:
    """Return the best plan of a run without one group of its nodes; None where every group pays.

    Clusters of more than `MOST_DEVICES_SEARCHED` devices are not searched.

    Args:
        run: as it was asked; `planned` has decided what it left open.
        planner: of the searches; default: the run file's.
        report: gets the number of groups that are decided, of all.
    """
    cluster = planned.problem.job.cluster
    several = len(cluster.groups) > 1 and cluster.ranks <= MOST_DEVICES_SEARCHED
    if not several or planned.ranking is None:
        return None
    value = goal_value(planned.problem, planned.prediction, planned.plan.ranks)
    found = []
    counted = CountedWork(report, "tried without", len(cluster.groups), "groups of nodes")
    for group in counted.each(cluster.groups):
        fewer = {"without": [*(run.cluster.without or ()), group.name]}
        batch = {"global_batch": planned.plan.global_batch}
        try:
            job = plan_run(changed(run, {"cluster": fewer, "train": batch}), planner=planner)
        except InputError:
            continue  # the job does not fit without them
        saved = 1 - goal_value(job.problem, job.prediction, job.plan.ranks) / value
        found.append(FewerNodes(group.name, job, saved))
    best = max(found, key=lambda one: one.saved, default=None)
    return best if best is not None and best.saved >= LEAST_GAIN else None
