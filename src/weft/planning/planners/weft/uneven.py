"""Layouts on unlike devices: every degree with the placements, stages and shares that suit its devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import groupby
from math import inf

import numpy as np

from weft.describe.layout import Layout, rank_order_of
from weft.describe.plan import RECOMPUTES, Recompute, shared_out
from weft.describe.units import format_seconds
from weft.errors import InputError
from weft.moves.composition import goes_forward_first
from weft.moves.layout import refuse
from weft.moves.sharers import unshared
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.planners.space import layouts
from weft.planning.planners.weft.estimates import LIGHT, StepEstimates, ideal_step_s
from weft.planning.planners.weft.placement import GroupOrder, devices_of, placements_of
from weft.planning.planners.weft.stages import Way, deal
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints

# The searched orders, with one stage per device and with several; others are tried on the found layouts. The
# second ones are for jobs whose methods need all forward passes first.
SCHEDULE, LOOPED = "1f1b", "depth-first"
_FORWARD_FIRST, _FORWARD_FIRST_LOOPED = "gpipe", "breadth-first"
# Layouts to suit, as a multiple of those to simulate: some turn out to be too big.
_SPARE = 2
_NOTHING_FITS = "no cut of the layers fits its devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suited:
    """A layout with stages, shares and places that suit its devices, and the estimate of its step."""

    layout: Layout
    placement: GroupOrder
    estimate_s: float


class UnevenSpace:
    """The layouts of one problem, suited to its devices."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._problem, self._bounds = problem, bounds
        self._times = ProblemLayerTimes(problem)
        self._seconds_of: dict[tuple[int, int, Recompute, int], Floats] = {}
        self._estimates = StepEstimates(problem, bounds)
        cluster = problem.job.cluster
        paces = [(cluster.group_index_of(rank), cluster.speed_of(rank)) for rank in range(cluster.ranks)]
        self._paces = sorted(set(paces))
        numbers = {pace: number for number, pace in enumerate(self._paces)}
        self._pace_of_rank: Ints = np.array([numbers[pace] for pace in paces])
        self._room_of_rank: Floats = problem.cost_model.network.places.room_bytes.astype(np.float64)

    def search(self, most_orders: int, kept: int) -> tuple[list[Suited], list[Candidate]]:
        """Return layouts with the least estimates first, and those that cannot be suited, with the reasons.

        All degrees that may be among the best are tried with two placements. The `kept` best are then tried
        with `most_orders` orders of nodes. Estimates are not equally good with one stage per device and with
        several. So the best of either kind are kept.
        """
        suited: list[Suited] = []
        left: list[Candidate] = []
        for looped in (False, True):
            found, why = self._search_among(self.layouts(looped=looped), most_orders, kept)
            suited += found
            left += why
        return sorted(suited, key=_estimate_s), left

    def _search_among(
        self, every: Iterator[Layout], most_orders: int, kept: int
    ) -> tuple[list[Suited], list[Candidate]]:
        cluster = self._problem.job.cluster
        suited: list[Suited] = []
        left: list[Candidate] = []
        placements = list(placements_of(cluster, 1))
        # Variants of a group differ in sharding and recomputation.
        groups = (
            list(variants) for _, variants in groupby(every, lambda one: unshared(one).recomputing("none"))
        )
        worst_s = inf
        least = ((min(map(self.ideal_s, one)), one) for one in groups)
        for least_s, variants in sorted(least, key=lambda entry: entry[0]):
            if least_s > worst_s:
                reason = f"at least {format_seconds(least_s)}; enough others are estimated at less"
                left += [Candidate(layout=one, verdict=Verdict.PRUNED, reason=reason) for one in variants]
                continue
            found, why = self._lightest_that_fit(variants, placements)
            suited += found
            left += why
            worst_s = worst_of(suited, _SPARE * kept)
        suited.sort(key=_estimate_s)
        more = [
            other
            for one in suited[:kept]
            for placement in list(placements_of(cluster, most_orders))[2:]
            for other in self.suited(one.layout.regular, placement)
        ]
        return [*suited, *more], left

    def ideal_s(self, layout: Layout) -> float:
        """Return a lower bound of the layout's estimate at any placement; 0 where times are not known."""
        try:
            times_s = self.seconds(layout)
        except InputError:
            return 0.0
        batch = self._problem.job.global_batch // layout.micro_batch_size
        return ideal_step_s(layout, batch, times_s, self._pace_of_rank)

    def layouts(self, *, looped: bool) -> Iterator[Layout]:
        """Yield all degrees with their shardings and recomputations, in one order unless another is pinned.

        With one stage per device, sharding more than optimizer states frees no memory. The device needs room
        for all of its weights and gradients at once.
        """
        pins, first = self._problem.pins, goes_forward_first(self._problem.job)
        one, several = (_FORWARD_FIRST, _FORWARD_FIRST_LOOPED) if first else (SCHEDULE, LOOPED)
        schedule = pins.schedule or (several if looped else one)
        for layout in layouts(replace(self._problem, pins=pins.replaced(schedule=schedule))):
            if (layout.loops > 1) == looped and (
                looped or pins.sharding is not None or layout.sharding in LIGHT
            ):
                yield layout

    def _lightest_that_fit(
        self, variants: list[Layout], placements: list[GroupOrder]
    ) -> tuple[list[Suited], list[Candidate]]:
        """Return the variants of one layout that may be fast, and the refused ones. First comes the first
        fitting variant with light sharding. If that recomputes, add the first fitting variant of each heavier
        sharding that recomputes less."""
        light = [one for one in variants if one.sharding in LIGHT]
        suited, refused = self._first_that_fit(light, placements)
        least = min((RECOMPUTES.index(one.layout.recompute) for one in suited), default=len(RECOMPUTES))
        more: dict[str, list[Layout]] = defaultdict(list)
        for one in variants:
            if one.sharding not in LIGHT and RECOMPUTES.index(one.recompute) < least:
                more[shared_out(one)].append(one)
        for heavier in more.values():
            found, why = self._first_that_fit(heavier, placements)
            suited += found
            refused += why
        return suited, refused

    def _first_that_fit(
        self, variants: list[Layout], placements: list[GroupOrder]
    ) -> tuple[list[Suited], list[Candidate]]:
        """Return the first fitting one of variants that hold less and less and take longer and longer."""
        refused: list[Candidate] = []
        for layout in sorted(variants, key=lambda one: (RECOMPUTES.index(one.recompute), one.sharding)):
            reason = refuse(self._problem.job, layout)
            if reason is not None:
                refused.append(Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason))
                continue
            try:
                found = [one for placement in placements for one in self.suited(layout, placement)]
            except InputError as error:
                # A profile that was not measured at this tensor degree refuses to guess.
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
        placement: GroupOrder,
        recomputes: Sequence[Recompute] = (),
    ) -> Iterator[Suited]:
        """Yield the layout with stages that suit its devices, with equal shares and with shares by speed.

        Args:
            layout: any.
            placement: the places of its ranks.
            recomputes: the choices of each stage, the least first; empty: the recomputation of the layout.

        Raises:
            InputError: when a profile was not measured at this tensor degree.
        """
        devices = devices_of(self._problem.job.cluster, layout, placement)
        words = recomputes or (layout.recompute,)
        alike = (replace(layout, recompute=word) for word in words)
        ways = [Way(self.seconds(one), [self._bounds.layer_bytes(one)] * len(self._paces)) for one in alike]
        pace = self.slowest(layout, devices)
        room = self.room_bytes(devices)
        place, in_flight = self._bounds.placement(layout)[0], self._in_flight(layout)
        batch = self._problem.job.global_batch // layout.micro_batch_size
        unlike = bool((pace != pace[:, :1]).any())
        for uneven in (False, True) if unlike else (False,):
            found = deal(ways, pace, place, room, in_flight, batch, uneven=uneven)
            if found is None:
                continue
            shaped = replace(
                layout.recomputing([words[way] for way in found.ways]),
                layers_per_stage=found.layers_per_stage if layout.stages > 1 else None,
                rank_order=rank_order_of(devices.ravel().tolist()),
                micro_batches_per_replica=found.micro_batches if len(set(found.micro_batches)) > 1 else None,
            )
            if refuse(self._problem.job, shaped) is None:
                estimate_s = self._estimates.step_s(layout, devices, found)
                yield Suited(layout=shaped, placement=placement, estimate_s=estimate_s)

    def slowest(self, layout: Layout, devices: Ints) -> Ints:
        """Return the pace of the slowest rank of each replica of a stage, shape (devices, replicas)."""
        paces = self._pace_of_rank[devices]
        slowness = np.zeros(len(self._paces))
        for pace in np.unique(paces).tolist():
            slowness[pace] = self.seconds_at(layout, pace).sum()
        return np.take_along_axis(paces, slowness[paces].argmax(axis=2)[:, :, None], axis=2)[:, :, 0]

    def seconds(self, layout: Layout) -> Sequence[Floats]:
        """Return the seconds of one micro-batch in each layer, at each pace, recomputed passes included."""
        return [self.seconds_at(layout, pace) for pace in range(len(self._paces))]

    def seconds_at(self, layout: Layout, pace: int) -> Floats:
        """Return the seconds of one micro-batch in each layer at a pace, recomputed passes included."""
        size, degree, recompute = layout.micro_batch_size, layout.tp, layout.recompute
        key = (size, degree, recompute, pace)
        if key not in self._seconds_of:
            group, speed = self._paces[pace]
            one = self._times.of_group(group, size, degree)
            self._seconds_of[key] = (one.both_s + one.again_s(recompute)) / speed
        return self._seconds_of[key]

    def room_bytes(self, ranks: Ints) -> Floats:
        """Return the memory of the smallest device of each place; `ranks` has shape (places, ...)."""
        room: Floats = self._room_of_rank[ranks].reshape(len(ranks), -1).min(axis=1)
        return room

    def _in_flight(self, layout: Layout) -> Floats:
        """Return the most micro-batches that each stage keeps; stages of a device share its micro-batches
        equally. Orders of very many micro-batches take long to make, so closed forms count for the searched
        ones."""
        devices, loops = layout.pp, layout.loops
        share = max(1, self._problem.job.global_batch // (layout.micro_batch_size * layout.dp))
        after = devices - 1 - np.arange(devices)
        if layout.schedule == SCHEDULE:
            kept = np.minimum(after + 1, share)
        elif layout.schedule == LOOPED:
            kept = np.minimum(2 * after + (loops - 1) * devices + 1, share * loops)
        else:
            kept = self._bounds.most_in_flight(layout)
        of_stage: Floats = kept[self._bounds.placement(layout)[0]] / loops
        return of_stage


def worst_of(suited: Sequence[Suited], count: int) -> float:
    """Return the longest of the `count` least estimates; infinite where there are fewer."""
    least = nsmallest(count, map(_estimate_s, suited))
    return least[-1] if len(least) == count else inf


def _estimate_s(one: Suited) -> float:
    return one.estimate_s
