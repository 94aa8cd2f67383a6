"""Clusters without some of their nodes: slow devices may delay the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from weft.describe.cluster import Cluster, NodeGroup
from weft.planning.problem import Problem


def beginnings_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster, then the cluster without its last group of nodes, without the last two and so on.

    Slow devices may delay the others. A plan's ranks are the first devices, so only the last can be left out.
    """
    for count in range(len(cluster.groups), 0, -1):
        yield _with(cluster, cluster.groups[:count])


def _with(cluster: Cluster, groups: tuple[NodeGroup, ...]) -> Cluster:
    """Return the cluster with these groups of its nodes only."""
    names = {group.name for group in groups}
    links = {pair: link for pair, link in cluster.links.items() if names.issuperset(pair)}
    return replace(cluster, groups=groups, links=links)


def fewer_nodes_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with half of the last group's nodes, a quarter and so on, down to one."""
    *others, last = cluster.groups
    count = last.count // 2
    while count:
        yield replace(cluster, groups=(*others, replace(last, count=count)))
        count //= 2


def unlike_devices(cluster: Cluster) -> bool:
    """Return True if devices differ in kind or speed, or nodes in their links, in any grouping."""
    speeds = {speed for group in cluster.groups for speed in group.speeds or (1.0,)}
    first, *others = (replace(group, name="", count=1, speeds=()) for group in cluster.groups)
    return len(speeds) > 1 or any(one != first for one in others) or len(set(cluster.links.values())) > 1


def kinds_of(problem: Problem) -> list[Problem]:
    """Return the problem on each kind of devices alone: on neighbouring groups of nodes with equal ones."""
    job, found = problem.job, []
    for _, alike in groupby(job.cluster.groups, key=lambda group: (group.device, group.speeds)):
        cluster = _with(job.cluster, tuple(alike))
        found.append(replace(problem, job=replace(job, cluster=cluster)))
    return found


def problems_of(problem: Problem) -> Iterator[Problem]:
    """Yield the problem, and the problem on the first groups of nodes alone, unless pins fix the degrees.

    Where cost is minimised, also yield fewer nodes of the last of these groups.
    """
    pins, job = problem.pins, problem.job
    yield problem
    if pins.pp is not None and pins.dp is not None:
        return
    for place, cluster in enumerate(beginnings_of(job.cluster)):
        fewer = fewer_nodes_of(cluster) if problem.minimise == "cost" else ()
        for one in (*((cluster,) if place else ()), *fewer):
            yield replace(problem, job=replace(job, cluster=one))
