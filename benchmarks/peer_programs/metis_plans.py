"""Metis' answer: the plans that its program prints, cheapest first, as layouts of weft where they can be."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.describe.layout import DENSE, Layout
from weft.describe.layout_text import counts_text
from weft.describe.plan import AXES
from weft.errors import RunError
from weft.moves.layout import refuse
from weft.moves.sharers import unshared
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.planners.metis_form import shared_by_speed
from weft.planning.planners.space import with_layers
from weft.program.schedules import get_schedule

from .metis_files import MetisInputs

_HEADING = "rank, cost, node_sequence"
_LISTS = r"\[([^\]]*)\]"
_KINDS = r"[\[(]([^\])]*)[\])]"
_LINE = re.compile(rf"(\d+), ([-+.\w]+), {_KINDS}, {_LISTS}, {_LISTS}, (\d+), {_LISTS}")
_NUMBER = re.compile(r"\d+")
# What its plans say or its program is told; everything else is as pinned.
_DECIDED = {*AXES, "loops", "micro_batch_size", "schedule", "recompute"}


class MetisPlan(NamedTuple):
    """One line of its answer.

    Attributes:
        cost_s: its cost.
        kinds: its kinds of devices in order.
        devices, degrees: devices and (replicas, tensor ranks) of each stage.
        micro_batches: of a replica.
        cuts: the first layer of each stage, and the end of the last.
    """

    cost_s: float
    kinds: tuple[str, ...]
    devices: tuple[int, ...]
    degrees: tuple[tuple[int, int], ...]
    micro_batches: int
    cuts: tuple[int, ...]


def read_plans(printed: Path, most: int) -> list[MetisPlan]:
    """The first of its plans in what it printed.

    Raises:
        RunError: when there are none, or a line of them cannot be read.
    """
    with printed.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(_HEADING):
                break
        else:
            raise RunError(f"metis: its answer has no heading {_HEADING!r}, ...")
        plans: list[MetisPlan] = []
        for line in lines:
            if len(plans) == most or not line.strip():
                break
            plans.append(_plan(line.strip()))
    if not plans:
        raise RunError("metis: it found no plan")
    return plans


def _plan(line: str) -> MetisPlan:
    found = _LINE.fullmatch(line)
    try:
        if found is None:
            raise ValueError
        devices, numbers, cuts = (tuple(map(int, _NUMBER.findall(found[place]))) for place in (4, 5, 7))
        plan = MetisPlan(
            cost_s=1e-3 * float(found[2]),
            kinds=tuple(re.findall(r"DeviceType\.(\w+)", found[3])),
            devices=devices,
            degrees=tuple(zip(numbers[::2], numbers[1::2], strict=True)),
            micro_batches=int(found[6]),
            cuts=cuts,
        )
        products = tuple(replicas * ranks for replicas, ranks in plan.degrees)
        if not (0.0 < plan.cost_s < math.inf and plan.micro_batches and len(cuts) == len(devices) + 1):
            raise ValueError
        if not devices or products != devices or 0 in devices:
            raise ValueError
    except ValueError:
        raise RunError(f"metis: its answer cannot be read: {line[:200]!r}") from None
    return plan


class Translated(NamedTuple):
    """A plan of Metis as a layout.

    Attributes:
        reason: why weft's plans cannot say it, empty where they can.
        approximated: the words for a part that they replace by another.
    """

    layout: Layout
    reason: str = ""
    approximated: str = ""


@dataclass(frozen=True)
class Translation:
    """Between the plans that Metis prints for a problem and layouts."""

    inputs: MetisInputs

    @cached_property
    def _times(self) -> ProblemLayerTimes:
        return ProblemLayerTimes(self.inputs.problem)

    def of(self, plan: MetisPlan) -> Translated:
        """The layout of a plan, or that of its first stage's degrees with the reason why it is another."""
        problem = self.inputs.problem
        replicas, width = plan.degrees[0]
        batch = problem.job.global_batch
        size = batch // replicas // plan.micro_batches
        layout = unshared(
            Layout(
                pp=len(plan.devices),
                dp=replicas,
                tp=width,
                loops=1,
                micro_batch_size=max(1, size),
                schedule=get_schedule(problem.pins.schedule or "1f1b").name,
                sync=problem.sync or DENSE,
                **problem.pins.besides(_DECIDED),
            )
        )
        counts = tuple(end - start for start, end in pairwise(plan.cuts))
        if len(set(plan.degrees)) > 1:
            each = ", ".join(f"{copies} x tp {ranks}" for copies, ranks in plan.degrees)
            return Translated(layout, f"stages of one plan of weft have the same degrees ({each})")
        if min(counts) < 1 or sum(counts) != len(problem.job.graph.layers):
            return Translated(layout, f"its stages have {counts_text(counts)} layers")
        if size * replicas * plan.micro_batches != batch:
            run = f"{plan.micro_batches} micro-batches of {size} samples on {replicas} replicas"
            return Translated(layout, f"{run} are not the {batch} samples of a step")
        devices = self._devices(plan.kinds)
        in_order = devices == tuple(range(layout.ranks))
        layout = replace(with_layers(layout, counts), rank_order=None if in_order else devices)
        if (reason := self._unpinned(layout) or refuse(problem.job, layout)) is not None:
            return Translated(layout, reason)
        shares = self._shares(layout, plan.micro_batches)
        approximated = ""
        if len(set(shares)) > 1:
            layout = replace(layout, micro_batches_per_replica=shares)
            approximated = "unequal parts of a micro-batch are unequal shares of whole ones"
        return Translated(layout, refuse(problem.job, layout) or "", approximated)

    def _devices(self, kinds: tuple[str, ...]) -> tuple[int, ...]:
        """The devices in the order of their kinds."""
        cluster, labels = self.inputs.problem.job.cluster, self.inputs.labels
        of_rank = [labels[cluster.device_of(rank).name] for rank in range(cluster.ranks)]
        return tuple(rank for kind in kinds for rank, its in enumerate(of_rank) if its == kind)

    def _shares(self, layout: Layout, micro_batches: int) -> tuple[int, ...]:
        """Micro-batches of each replica, by its slowest stage; equal ones where all are as fast."""
        cluster = self.inputs.problem.job.cluster
        ranks = np.array(layout.rank_order or range(layout.ranks)).reshape(layout.pp, layout.dp, layout.tp)
        counts = layout.layers_per_stage or (len(self.inputs.problem.job.graph.layers),)
        ends = np.cumsum(counts)
        longest_s = np.zeros(layout.dp)
        for stage, (count, end) in enumerate(zip(counts, ends.tolist(), strict=True)):
            for replica in range(layout.dp):
                groups = {cluster.group_index_of(rank) for rank in ranks[stage, replica].tolist()}
                seconds = max(
                    self._times.of_group(group, layout.micro_batch_size, layout.tp)
                    .both_s[end - count : end]
                    .sum()
                    for group in groups
                )
                longest_s[replica] = max(longest_s[replica], seconds)
        return shared_by_speed(1.0 / longest_s, micro_batches * layout.dp)

    def _unpinned(self, layout: Layout) -> str | None:
        """Return the pins that the layout does not hold to, in words."""
        pins = self.inputs.problem.pins
        pinned = {
            "pp": (pins.pp, layout.pp),
            "dp": (pins.dp, layout.dp),
            "tp": (pins.tp, layout.tp),
            "micro-batch size": (pins.micro_batch_size, layout.micro_batch_size),
        }
        wrong = [f"{name} {wanted}" for name, (wanted, own) in pinned.items() if wanted not in (None, own)]
        return f"{' and '.join(wrong)} pinned" if wrong else None
