"""Layouts with different recomputation per stage: each stage recomputes as little as memory allows.

Under most orders early stages keep more micro-batches than late ones, and the last stage keeps the logits. So
one stage may have to recompute tensors that another can keep. With one stage per device, the bytes of a
device depend on its own stage alone. The lightest choice that fits, stage by stage, is then exact. Fewer
layers suit stages that recompute: `weft.planning.planners.weft.stages.deal` finds cuts and choices together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES, Recompute
from weft.errors import InputError
from weft.moves.layout import parts_of, refuse
from weft.planning.planners.base import Candidate
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.space import layouts, overlaps
from weft.planning.planners.weft.placement import GroupOrder, placements_of
from weft.planning.planners.weft.uneven import Suited, UnevenSpace, worst_of
from weft.planning.problem import Problem
from weft.program.arrays import Floats
from weft.program.schedules import get_schedule
from weft.program.schedules.base import paths_of


def choices(problem: Problem) -> tuple[Recompute, ...]:
    """Return the recomputation choices of a stage, the lightest first; empty where there is no choice."""
    if problem.pins.recompute is not None or problem.minimise == "memory":
        return ()
    if not overlaps(problem.job.cluster):
        return ()
    return tuple(one for one in RECOMPUTES if one != "selective" or problem.job.graph.knows_products)


class MixedSpace:
    """Recomputation per stage for the layouts of one problem that leaves recomputation open."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._words = choices(problem)
        self._problem = replace(problem, pins=problem.pins.replaced(recompute="none"))
        self._bounds = bounds
        self._uneven = UnevenSpace(self._problem, bounds)
        self._room_of_rank: Floats = problem.cost_model.network.places.room_bytes.astype(np.float64)

    def on_equal_devices(self, may_win: Callable[[Layout], bool]) -> Iterator[Layout]:
        """Yield layouts of every degree, order and sharding, least lower bound of the step first.

        Stop at the first layout that cannot win. Suit a layout when its turn comes: recomputation lengthens
        its step.
        """
        possible = (one for one in self._possible(layouts(self._problem)) if may_win(one))
        waiting = [(self._bounds.step_s(one), place, one, False) for place, one in enumerate(possible)]
        heapify(waiting)
        while waiting:
            _, number, layout, suited = heappop(waiting)
            if not may_win(layout):
                return
            if suited:
                yield layout
            elif (mixed := self._best_of(layout)) is not None:
                heappush(waiting, (self._bounds.step_s(mixed), number, mixed, True))

    def on_unlike_devices(self, may_win: Callable[[float, Layout], bool], kept: int) -> list[Suited]:
        """Return layouts of every degree with stages that suit their devices, least estimate first.

        They may win at their ideal step. The `kept` best, with one stage per device and with several, are
        among them.
        """
        placements = list(placements_of(self._problem.job.cluster, 1))
        every: list[Suited] = []
        for looped in (False, True):
            found: list[Suited] = []
            possible = self._possible(self._uneven.layouts(looped=looped))
            ideal = ((self._uneven.ideal_s(one), one) for one in possible)
            for least_s, layout in sorted(ideal, key=lambda entry: entry[0]):
                if least_s > worst_of(found, kept) or not may_win(least_s, layout):
                    break
                for placement in placements:
                    found += self._uneven.suited(layout, placement, self._words)
            every += found
        return sorted(every, key=lambda one: one.estimate_s)

    def lightest(self, layout: Layout, spare_bytes: Floats | None = None) -> Layout | None:
        """Return the layout with the least recomputation in each stage that fits; None where nothing does.

        With several stages per device, all stages of a device first recompute alike. Then each stage, largest
        gain first, takes the lightest choice that still fits.

        Args:
            layout: any.
            spare_bytes: memory to leave empty on each device of the pipeline, shape (devices,).
        """
        room = self._room(layout)
        if spare_bytes is not None:
            room = room - spare_bytes
        held = np.array([self._held(layout.recomputing(word)) for word in self._words])
        placement = self._bounds.placement(layout)
        # True where a choice fits on all devices of a stage: (choices, stages).
        fits = (held <= room)[:, placement].all(axis=1)
        if not fits.any(axis=0).all():
            return None
        found = layout.recomputing([self._words[first] for first in fits.argmax(axis=0).tolist()])
        found = found if placement.size == layout.pp else self._relaxed(found, room)
        return self._with_counts(found)

    def may_fit(self, layout: Layout) -> bool:
        """Return True if the states and activations of every device fit; messages are left out."""
        return bool((self._held(layout) <= self._room(layout)).all())

    def with_more(self, judged: Candidate) -> Layout | None:
        """Return a layout that the simulator found too big with more recomputation on the overfull devices.

        Stages of the other devices keep their recomputation. Return None where that is not enough.
        """
        assert judged.prediction is not None, "what is too big was simulated"
        layout, needs = judged.chain, np.array(judged.prediction.needs_at(self._problem.memory_risk))
        usable_bytes = self._problem.cost_model.network.places.usable_bytes[: len(needs)]
        over = self._by_place(layout, needs - usable_bytes).max(axis=1)
        spare = self._room(layout) - self._held(layout) + np.maximum(over, 0.0)
        return self.lightest(layout, spare)

    def _possible(self, every: Iterator[Layout]) -> Iterator[Layout]:
        """Yield the legal layouts with several stages."""
        for layout in every:
            if layout.stages == 1 or refuse(self._problem.job, layout) is not None:
                continue
            try:
                self._bounds.layer_seconds(layout)
            except InputError:
                continue  # a profile was not measured at some degree
            yield layout

    def _best_of(self, layout: Layout) -> Layout | None:
        """Return the lightest with balanced stages, or with stages that suit it, by the least lower bound."""
        if self._bounds.resident_bytes(layout) > self._bounds.largest_memory_bytes:
            return None
        tried = [layout]
        if layout.loops == 1 and paths_of(get_schedule(layout.schedule)) == 1:
            in_order = GroupOrder(tuple(range(len(self._problem.job.cluster.groups))), False)
            tried += [one.layout for one in self._uneven.suited(layout, in_order, self._words)]
        found = [lightest for one in tried if (lightest := self.lightest(one)) is not None]
        return min(found, key=self._bounds.step_s, default=None)

    def _with_counts(self, layout: Layout) -> Layout:
        """State the layers per stage where stages are not balanced or recompute differently."""
        balanced = replace(layout, layers_per_stage=None)
        counts = tuple(len(part) for part in parts_of(balanced, self._bounds.layer_seconds(layout)))
        if layout.recompute_per_stage is not None:
            return replace(layout, layers_per_stage=layout.layers_per_stage or counts)
        return balanced if layout.layers_per_stage == counts else layout

    def _relaxed(self, layout: Layout, room: Floats) -> Layout:
        """Give the stages, largest gain first, the lightest choice that fits."""
        words = list(layout.recomputes)
        lightest_s = self._bounds.stage_seconds(layout.recomputing(self._words[0]))
        gains_s = np.array(self._bounds.stage_seconds(layout)) - np.array(lightest_s)
        for stage in np.argsort(-gains_s, kind="stable").tolist():
            for lighter in self._words[: self._words.index(words[stage])]:
                tried = [*words[:stage], lighter, *words[stage + 1 :]]
                if (self._held(layout.recomputing(tried)) <= room).all():
                    words = tried
                    break
        return layout.recomputing(words)

    def _held(self, layout: Layout) -> Floats:
        """Return the bytes that each device of a pipeline may hold, without messages; shape (devices,)."""
        return self._bounds.held_at_risk(layout).astype(np.float64)

    def _room(self, layout: Layout) -> Floats:
        """Return the memory of the smallest device at each place of a pipeline, shape (devices,)."""
        room: Floats = self._by_place(layout, self._room_of_rank).min(axis=1)
        return room

    def _by_place(self, layout: Layout, of_rank: Floats) -> Floats:
        """Return the values of ranks by place in the pipeline, shape (devices, ranks of each)."""
        ranks = np.arange(layout.ranks) if layout.rank_order is None else np.array(layout.rank_order)
        return of_rank[ranks].reshape(layout.pp, -1)
