"""Remedies for a job that no layout fits: fewer pins, more devices, larger ones, or a job that holds less.

Each remedy is found by a search over homogeneous layouts in one order, which is a first answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import ceil
from pathlib import Path

from weft.bundles import parts
from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster
from weft.describe.device import Device
from weft.describe.layout import OPEN
from weft.describe.relief import Relief
from weft.describe.run_file import RunFile, changed
from weft.describe.units import counted, format_seconds
from weft.errors import InputError
from weft.files import weft_home
from weft.planning.cluster_changes import changed_cluster
from weft.planning.goals import cost_words
from weft.planning.nothing_fits import NothingFitsError, pins_words
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.problem import Problem, problem_of_run
from weft.planning.what_if import on_cluster
from weft.progress import CountedWork, ProgressReport, unwatched

# Kinds of larger devices that are tried, and doublings of nodes beyond what the closest layout lacks.
MOST_TRIED = 4
# Doublings of a cluster of larger devices.
MOST_DOUBLED = 6
PLANNER = HomogeneousPlanner(finalists=1)
# The memory of a tried device over that of the one before.
LARGER = 1.15
# An order that holds few activations, for any number of stages of a device.
ORDER = "hybrid"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A changed job with a layout that fits; `change` has the change in words."""

    change: str
    problem: Problem
    best: Candidate

    @property
    def words(self) -> str:
        """The change, what a step takes then, and what tokens cost where devices have prices."""
        price = cost_words(self.problem, self.best.step_s, self.best.chain.ranks)
        cost = "" if price is None else f", {price}"
        return f"{self.change}: a step of {format_seconds(self.best.step_s)}{cost} ({self.best.words})"


def remedies(
    run: RunFile,
    error: NothingFitsError,
    *,
    home: Path | None = None,
    report: ProgressReport = unwatched,
) -> Iterator[Remedy]:
    """Yield what would make a job fit: no pins, one larger cluster, one larger device, or other methods.

    Args:
        run: the job as it was asked.
        home: the folder of measurements (default: `weft_home()`).
        report: gets the number of kinds of changes that are tried, of all.
    """
    problem, home = error.ranking.problem, home or weft_home()
    if all(one.verdict is Verdict.REFUSED for one in error.ranking.candidates):
        return  # it is not the memory that is missing
    reliefs = list(parts(Relief))
    counted = CountedWork(report, "tried", 3 + len(reliefs), "kinds of changes")
    if problem.pins.given:
        pins = pins_words(problem.pins.given)
        yield from _searched(f"other choices than {pins}", replace(problem, pins=OPEN))
    counted.finish()
    for changes in counted.each((_more_nodes(error), _larger_devices(problem))):
        tried = (_searched(words, on_cluster(problem, cluster, home)) for words, cluster in changes)
        yield from islice(chain.from_iterable(tried), 1)
    for relief in counted.each(reliefs):
        try:
            other = problem_of_run(changed(run, relief.keys), home=home)
            found = list(_searched(relief.words, replace(other, pins=problem.pins)))
        except InputError:
            continue  # the method is not for this job
        yield from found


def _searched(change: str, problem: Problem) -> Iterator[Remedy]:
    """Yield the remedy, if a layout fits."""
    pins = problem.pins.replaced(schedule=problem.pins.schedule or ORDER)
    for best in PLANNER.search(replace(problem, pins=pins)).fitting[:1]:
        yield Remedy(change=change, problem=problem, best=best)


def _more_nodes(error: NothingFitsError) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with 1, 2, 4, ... more nodes of its largest devices, then with 2, 4, ... times them.

    Layouts divide a multiple of the nodes in more ways. The last of each is several times what the closest
    layout lacks, as other layouts may need less or more.
    """
    cluster = error.ranking.problem.job.cluster
    group = max(cluster.groups, key=lambda one: one.device.usable_bytes)
    least_bytes = error.ranking.closest[0].peak_bytes
    lacking = ceil(group.count * (least_bytes / group.device.usable_bytes - 1.0))
    doubled = [2**times for times in range(max(1, lacking).bit_length() + MOST_TRIED)]
    for count in (*doubled, *(group.count * (2 * times - 1) for times in doubled)):
        try:
            grown = changed_cluster(cluster, f"+{count} nodes {group.name}")
        except InputError:
            return  # nobody has described a network between nodes, or the cluster would be too large
        more = f"{count * group.devices} more {group.device.name}"
        yield f"{more} ({counted(grown.ranks, 'device')})", grown


def _larger_devices(problem: Problem) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with devices of the catalogue that have more memory, the smallest first.

    Then come 2, 4, ... times as many nodes of the largest of them.
    """
    cluster, precision = problem.job.cluster, problem.job.precision
    largest = max(group.device.memory_bytes for group in cluster.groups)
    able = (entry.device for entry in catalogue().values() if precision in entry.device.flops_per_s)
    larger: list[Device] = []
    for device in sorted(able, key=lambda one: one.memory_bytes):
        if device.memory_bytes >= LARGER * (larger[-1].memory_bytes if larger else largest):
            larger.append(device)
    names = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
    for device in larger[:MOST_TRIED]:
        grown = changed_cluster(cluster, f"device {device.name}")
        yield f"{device.name} instead of {names}", grown
    for _ in range(MOST_DOUBLED if larger else 0):
        for group in grown.groups:
            grown = changed_cluster(grown, f"+{group.count} nodes {group.name}")
        yield f"{grown.ranks} {device.name} instead of {names}", grown
