"""Layouts on unlike devices: every degree with the placements, stages and shares that suit its devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from weft.describe.plan import RECOMPUTES, Recompute
from weft.describe.units import format_seconds
from weft.errors import InputError
from weft.moves.layout import Layout, refuse
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.layer_times import LayerTimes
from weft.planning.planners.space import layouts
from weft.planning.planners.weft.placement import Placement, devices_of, placements_of, rank_order_of
from weft.planning.planners.weft.stages import Dealt, Way, deal
from weft.planning.problem import Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The order that is searched over; others are tried on what it finds.
SCHEDULE = "1f1b"
# States that every rank holds, or shares out with little to exchange for it.
_SHARDINGS = ("zero-0", "zero-1")
_NOTHING_FITS = "no cut of the layers fits its devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suited:
    """A layout with stages, shares and places that suit its devices; `estimate_s` is of its step."""

    layout: Layout
    placement: Placement
    estimate_s: float

    def candidate(self) -> Candidate:
        return Candidate(
            layout=self.layout,
            verdict=Verdict.PRUNED,
            reason=f"estimated {format_seconds(self.estimate_s)}, others less",
        )


class UnevenSpace:
    """Suits the layouts of one problem to its devices."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._problem, self._bounds = problem, bounds
        self._times = LayerTimes(problem)
        self._network = problem.cost_model.network
        cluster = problem.job.cluster
        paces = [(cluster.group_index_of(rank), cluster.speed_of(rank)) for rank in range(cluster.ranks)]
        self._paces = sorted(set(paces))
        numbers = {pace: number for number, pace in enumerate(self._paces)}
        self._pace_of_rank: Ints = np.array([numbers[pace] for pace in paces])
        self._room_of_rank: Floats = np.array(
            [cluster.groups[group].device.usable_bytes for group, _ in paces], dtype=np.float64
        )

    def search(self, most_orders: int, kept: int) -> tuple[list[Suited], list[Candidate]]:
        """The layouts with the least estimates first, and those that cannot be suited, with the reasons.

        All degrees are tried with two placements; the `kept` best of them with `most_orders` orders of nodes.
        """
        cluster = self._problem.job.cluster
        suited: list[Suited] = []
        refused: list[Candidate] = []
        for _, variants in groupby(self.layouts(), key=_without_memory):
            found, why = self._first_that_fit(list(variants), list(placements_of(cluster, 1)))
            suited += found
            refused += why
        suited.sort(key=lambda one: one.estimate_s)
        more = [
            other
            for one in suited[:kept]
            for placement in list(placements_of(cluster, most_orders))[2:]
            for other in self.suited(one.layout.regular, placement)
        ]
        return sorted([*suited, *more], key=lambda one: one.estimate_s), refused

    def layouts(self) -> Iterator[Layout]:
        """All degrees with what they may share out and recompute; one order, unless another is pinned."""
        pins = self._problem.pins
        plain = replace(pins, schedule=pins.schedule or SCHEDULE, loops=pins.loops or 1)
        for layout in layouts(replace(self._problem, pins=plain)):
            if layout.island is None and (pins.sharding is not None or layout.sharding in _SHARDINGS):
                yield layout

    def _first_that_fit(
        self, variants: list[Layout], placements: list[Placement]
    ) -> tuple[list[Suited], list[Candidate]]:
        """Of variants that hold less and less, and take longer and longer, the first that fit."""
        refused: list[Candidate] = []
        for layout in sorted(variants, key=lambda one: (RECOMPUTES.index(one.recompute), one.sharding)):
            reason = refuse(self._problem.job, layout)
            if reason is not None:
                refused.append(Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason))
                continue
            try:
                found = [one for placement in placements for one in self.suited(layout, placement)]
            except InputError as error:
                # A profile that was not measured at this micro-batch size refuses to guess.
                reason = str(error.violations[0])
                refused.append(Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason))
                continue
            if found:
                return found, refused
            refused.append(Candidate(layout=layout, verdict=Verdict.TOO_BIG, reason=_NOTHING_FITS))
        return [], refused

    def suited(
        self,
        layout: Layout,
        placement: Placement,
        recomputes: Sequence[Recompute] = (),
        spare_bytes: Floats | None = None,
    ) -> Iterator[Suited]:
        """The layout with stages that suit its devices, with equal shares and with shares by speed.

        Args:
            layout: with one stage per device.
            placement: where its ranks sit.
            recomputes: what each stage may choose from, the least first; nothing: what the layout says.
            spare_bytes: memory of each stage's devices that is left empty, shape (stages,).

        Raises:
            InputError: when a profile was not measured at this micro-batch size or tensor degree.
        """
        devices = devices_of(self._problem.job.cluster, layout, placement)
        words = recomputes or (layout.recompute,)
        ways = [self._way(replace(layout, recompute=word)) for word in words]
        slowness = np.array([times.sum() for times in ways[0].times_s])
        every = self._pace_of_rank[devices]
        pace = np.take_along_axis(every, slowness[every].argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
        room = self._room_of_rank[devices].min(axis=(1, 2))
        if spare_bytes is not None:
            room = room - spare_bytes
        batch = self._problem.job.global_batch // layout.micro_batch_size
        unlike = bool((pace != pace[:, :1]).any())
        for uneven in (False, True) if unlike else (False,):
            found = deal(ways, pace, room, self._in_flight(layout), batch, uneven=uneven)
            if found is None:
                continue
            shaped = replace(
                layout.recomputing([words[way] for way in found.ways]),
                layers_per_stage=found.layers_per_stage if layout.stages > 1 else None,
                rank_order=rank_order_of(devices),
                micro_batches_per_replica=found.micro_batches if len(set(found.micro_batches)) > 1 else None,
            )
            if refuse(self._problem.job, shaped) is None:
                estimate_s = found.pipeline_s + self._exchanged_s(layout, devices, found)
                yield Suited(layout=shaped, placement=placement, estimate_s=estimate_s)

    def _way(self, layout: Layout) -> Way:
        """One micro-batch through each layer, at each pace; passes that are run again included."""
        size, degree = layout.micro_batch_size, layout.tensor_parallel
        times_s = []
        for group, speed in self._paces:
            passes = self._times.of_group(group, size, degree)
            times_s.append((passes.both_s + passes.again_s(layout.recompute)) / speed)
        return Way(times_s, self._bounds.layer_bytes(layout))

    def _in_flight(self, layout: Layout) -> Ints:
        """Micro-batches that each stage keeps at most."""
        stages = layout.pipeline_parallel
        if layout.schedule != SCHEDULE:
            return self._bounds.most_in_flight(layout)
        # Orders of very many micro-batches take long to make.
        share = self._problem.job.global_batch // (layout.micro_batch_size * layout.data_parallel)
        return np.minimum(stages - np.arange(stages), max(1, share))

    def _exchanged_s(self, layout: Layout, devices: Ints, found: Dealt) -> float:
        """Seconds of one micro-batch's hops through a pipeline and back, and of the largest reduction."""
        memory = self._bounds.layer_bytes(layout)
        ends = np.cumsum(found.layers_per_stage)
        by_stage = np.add.reduceat(memory.gradients, ends - np.array(found.layers_per_stage))
        largest = int(np.argmax(by_stage))
        reduced_s = self._network.all_reduce_s(
            devices[largest, :, 0].tolist(), round(float(by_stage[largest]))
        )
        graph, shape = self._problem.job.graph, self._bounds.shape(layout)
        sent = round(graph.layers[len(graph.layers) // 2].sent(shape) * self._bounds.element_bytes)
        firsts = devices[:, 0, 0].tolist()
        hops = (self._network.message_s(rank, peer, sent) for rank, peer in pairwise(firsts))
        return reduced_s + 2.0 * sum(map(sum, hops))


def _without_memory(layout: Layout) -> Layout:
    """What is alike in variants that differ in what they hold."""
    return replace(layout, sharding="zero-0").recomputing("none")
