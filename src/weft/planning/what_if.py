"""Forecasts of a job on another cluster: the same search again, on the cluster after a change.

The job stays the same, with its global batch. Each change applies to the given cluster alone. Where there are
several, the last forecast applies all together, in the order given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from weft.describe.cluster import Cluster
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.planning.cluster_changes import changed_cluster
from weft.planning.goals import cost_per_million
from weft.planning.planned import plan_problems, renamed
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate, Planner, Verdict, get_planner
from weft.planning.planners.simulated import judged
from weft.planning.problem import Problem
from weft.planning.throughput import throughput
from weft.planning.ties import break_ties
from weft.predict.measurements import load_devices
from weft.progress import CountedWork, ProgressReport, unwatched

TOGETHER = "all together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The best plan on one cluster.

    Attributes:
        change: in the words of the user; empty for the cluster as it is.
        cluster: the cluster after the change.
        best: its best plan, None where none fits.
        reason: the reason why there is none, else empty.
        unchanged: the best plan of the cluster as it is, run on this one; it may not fit.
        tokens_per_s: of the best plan; samples for models of images.
        cost_per_million_tokens: in the currency of the devices' prices, all devices of the cluster paid for
            the whole step; None where a device has no price.
        against: step of the best plan over the one of the cluster as it is.
    """

    change: str
    cluster: Cluster
    best: Candidate | None
    reason: str
    unchanged: Candidate
    tokens_per_s: float | None
    cost_per_million_tokens: float | None
    against: float | None

    @property
    def step_s(self) -> float | None:
        return self.best.step_s if self.best is not None else None


def what_if(
    planned: PlannedJob,
    planner: str,
    changes: Sequence[str],
    *,
    home: Path | None = None,
    report: ProgressReport = unwatched,
) -> tuple[Forecast, ...]:
    """Return the forecasts of the cluster as it is, of each change, and of all together if several.

    Args:
        planned: a job with a plan searched by `planner`.
        home: the folder of measurements (default: `weft_home()`).
        report: gets the number of forecasts that are made, of all.

    Raises:
        InputError: for words that are no change, with all of them at once.
    """
    problem, ranking = planned.problem, planned.searched
    clusters = _clusters(problem.job.cluster, changes)
    base = ranking.fitting[0]
    as_it_is = _forecast("", problem, base, "", base, None)
    found = [as_it_is]
    counted = CountedWork(report, "forecasting", len(clusters), "clusters")
    for change, cluster in counted.each(clusters.items()):
        other = on_cluster(problem, cluster, home or weft_home())
        best, reason = _searched(get_planner(planner), other)
        found.append(_forecast(change, other, best, reason, _unchanged(other, base), as_it_is.step_s))
    return tuple(found)


def _clusters(cluster: Cluster, changes: Sequence[str]) -> dict[str, Cluster]:
    """Return the clusters by change; all changes are read before any search."""
    found: dict[str, Cluster] = {}
    problems: list[Violation] = []
    for change in changes:
        try:
            found[" ".join(change.split())] = changed_cluster(cluster, change)
        except InputError as error:
            problems += error.violations
    if problems:
        raise InputError(problems)
    if len(found) > 1:
        found[TOGETHER] = reduce(changed_cluster, found, cluster)
    return found


def on_cluster(problem: Problem, cluster: Cluster, home: Path) -> Problem:
    """Return the problem on another cluster, with the measurements of its devices.

    Measured links do not count where the description of links inside nodes has changed. A correction stays
    where the devices are of the same kinds, with the same sources of their times.
    """
    job = replace(problem.job, cluster=cluster)
    measured = load_devices(job, home)
    described = {group.link for group in problem.job.cluster.groups}
    if measured.machine is not None and not {group.link for group in cluster.groups} <= described:
        measured = replace(measured, machine=replace(measured.machine, message=(), collectives={}))
    correction = problem.measurements.correction
    if correction is not None and correction.covers(measured.sources(cluster, job.precision)):
        measured = replace(measured, correction=correction)
    return replace(problem, job=job, measurements=measured)


def _searched(planner: Planner, problem: Problem) -> tuple[Candidate | None, str]:
    """Return the best candidate, or the reason why there is none."""
    job = problem.job
    unable = [
        group.device.name for group in job.cluster.groups if job.precision not in group.device.flops_per_s
    ]
    if unable:
        return None, f"{unable[0]} does not compute in {job.precision}"
    try:
        ranking = break_ties(planner.search(problem))
    except InputError as error:
        return None, str(error.violations[0])
    if ranking.fitting:
        return ranking.fitting[0], ""
    if not ranking.candidates:
        return None, f"no layout of {counted(job.cluster.ranks, 'device')} has the given degrees"
    closest = ranking.closest[0]
    return None, f"no layout fits; closest: {closest.words}: {closest.reason}"


def _unchanged(problem: Problem, base: Candidate) -> Candidate:
    """Return the unchanged plan on another cluster, with its own stages."""
    assert base.plan is not None, "a fitting candidate was simulated"
    plan, job = renamed(base.plan, problem.job), problem.job
    if plan.ranks > job.cluster.ranks:
        reason = f"it has {counted(plan.ranks, 'rank')}, the cluster has {job.cluster.ranks}"
    elif violations := plan_problems(plan, job):
        reason = str(violations[0])
    else:
        return judged(problem, base, plan)
    return replace(base, verdict=Verdict.REFUSED, reason=reason, plan=None, prediction=None)


def _forecast(
    change: str,
    problem: Problem,
    best: Candidate | None,
    reason: str,
    unchanged: Candidate,
    base_s: float | None,
) -> Forecast:
    job, step_s = problem.job, best.step_s if best is not None else None
    tokens_per_s = None
    if best is not None and best.plan is not None and step_s:
        rate = throughput(job, best.plan.servers.start, step_s, reads_tokens=problem.model.reads_tokens)
        tokens_per_s = rate.tokens_per_s or rate.samples_per_s
    return Forecast(
        change=change,
        cluster=job.cluster,
        best=best,
        reason=reason,
        unchanged=unchanged,
        tokens_per_s=tokens_per_s,
        cost_per_million_tokens=cost_per_million(problem, step_s) if step_s else None,
        against=step_s / base_s if step_s and base_s else None,
    )
