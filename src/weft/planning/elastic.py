"""Elastic runs: the plans of a job for fewer nodes, made before some are lost.

`torchrun` starts the ranks of the nodes that are there. A start takes the largest plan for so many ranks.
Nodes beyond it wait as spares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.describe.left_out import without_nodes
from weft.describe.run_file import RunFile
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.planning.lost_replicas import goes_on
from weft.planning.measured_changes import changes_of
from weft.planning.planned import plan_run, posed
from weft.planning.planned_job import PlannedJob
from weft.progress import CountedWork, ProgressReport, unwatched

LEAST, MOST = "run.min_nodes", "run.max_nodes"


class NodeLimits(NamedTuple):
    """The fewest and the most nodes with which `torchrun` starts a run, and those of its plan."""

    least: int
    most: int
    planned: int

    @property
    def elastic(self) -> bool:
        return self.least < self.most


def node_limits(job: PlannedJob) -> NodeLimits:
    """Return the limits of a job that is not refused; one that says none has the nodes of its plan."""
    table, group = job.run.run, job.problem.job.cluster.groups[0]
    planned = -(-job.plan.ranks // group.devices)
    return NodeLimits(table.min_nodes or planned, table.max_nodes or planned, planned)


def refused_limits(job: PlannedJob) -> list[Violation]:
    """Return the first reason why a run cannot start with other numbers of nodes; empty if it can."""
    table, plan, groups = job.run.run, job.plan, job.problem.job.cluster.groups
    if table.min_nodes is None and table.max_nodes is None:
        return []
    key = LEAST if table.min_nodes is not None else MOST
    limits, devices = node_limits(job), groups[0].devices
    problem, hint = None, ""
    if len(groups) > 1:
        kinds = ", ".join(group.name for group in groups)
        problem = f"nodes are of several kinds ({kinds}), and any of them may be missing"
    elif plan.ranks % devices:
        problem = (
            f"the plan has {counted(plan.ranks, 'rank')}, and only whole nodes of {devices} may be missing"
        )
    elif limits.least > limits.planned:
        problem, hint = f"{limits.least}; the plan has {counted(limits.planned, 'node')}", str(limits.planned)
    elif limits.most < limits.planned:
        key, hint = MOST, str(limits.planned)
        problem = f"{limits.most}; the plan has {counted(limits.planned, 'node')}"
    elif job.run.plan.then is not None:
        problem = "plan.then changes the plan, too"
    elif goes_on(job):
        problem = "run.on_death changes the plan, too"
    elif changes := changes_of(plan):
        problem = f"{changes[0].key} changes the plan, too"
    return [] if problem is None else [Violation(key, problem, hint)]


def plans_at_hand(job: PlannedJob, report: ProgressReport = unwatched) -> dict[int, PlannedJob]:
    """Return the job's own plan and the best ones on fewer nodes, by their number of ranks.

    They keep batch, sequence, precision and synchronisation. A pinned `dp` is for the job's own plan alone.
    Where nothing fits on some number of nodes, a start with so many takes a smaller plan. Without limits
    there is no other plan.

    Raises:
        InputError: if there is no plan for the fewest nodes.
    """
    limits = node_limits(job)
    if not limits.elastic:
        return {}
    devices = job.problem.job.cluster.groups[0].devices
    found = {job.plan.ranks: job}
    fewer = range(limits.planned - 1, limits.least - 1, -1)
    work = CountedWork(report, "planned for", len(fewer), "numbers of nodes")
    for nodes in work.each(fewer):
        try:
            smaller = _on_nodes(job, nodes)
        except InputError as error:
            if nodes > limits.least:
                continue
            words = f"no plan for {counted(nodes, 'node')}: {error.violations[0]}"
            raise InputError(Violation(LEAST, words)) from None
        if smaller.plan.ranks % devices == 0:
            found.setdefault(smaller.plan.ranks, smaller)
    return found


def _on_nodes(job: PlannedJob, nodes: int) -> PlannedJob:
    cluster = job.problem.job.cluster
    (group,) = cluster.groups
    name = f"{nodes} of {group.count} nodes of {cluster.name}"
    smaller = replace(without_nodes(cluster, group, group.count - nodes), name=name)
    subject = job.problem.subject(_open_to_fewer(job.run)).pinned(job.plan)
    run, problem = posed(subject.model_copy(update={"cluster": smaller}), job.plan)
    return plan_run(run, problem=problem)


def _open_to_fewer(run: RunFile) -> RunFile:
    """Return a run file without what only the whole cluster can hold: replicas and a deadline."""
    tables = {
        "plan": run.plan.model_copy(update={"dp": None}),
        "goal": run.goal.model_copy(update={"deadline_hours": None}),
    }
    return run.model_copy(update=tables)
