"""Lower bounds of the step time and the memory of layouts, without simulating them.

The order of each pipeline is made once. Exchanges between context ranks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np

from weft.bundles import parts
from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.layout import Layout
from weft.describe.loss_choice import Loss
from weft.describe.plan import Recompute
from weft.describe.prediction import margin_at
from weft.moves.layout import parts_of, pipeline_of
from weft.moves.sharers import sharers_of
from weft.planning.planners.kept_micro_batches import KeptMicroBatches
from weft.planning.planners.layer_times import LeastCosts
from weft.planning.problem import Problem
from weft.predict.cost.memory import (
    ALLOCATOR_SLACK,
    SHARDINGS,
    STEPPED_BYTES,
    buffered_bytes,
    resident_states,
    state_bytes,
    with_slack,
)
from weft.predict.cost.residency import LIVE_SPREAD, RESIDENT_SPREAD, KeptAway
from weft.program.arrays import Floats, Ints
from weft.program.buffers import SHARDED_BUFFERS
from weft.program.schedules import SCHEDULES, get_schedule, splits_backward
from weft.program.schedules.base import Pipeline, placements

# Shape of a micro-batch, loss, stages, layers per stage: together they decide where the layers are cut.
_CutKey = tuple[Shape, Loss, int | None, int, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The least that the fullest device of a layout holds at its peak, in bytes."""

    resident: int
    activations: int

    @property
    def total(self) -> int:
        return self.resident + self.activations


class LayerBytes(NamedTuple):
    """Bytes of every layer on a rank, each of shape (layers,).

    `states` are the layer's states. `left` is what a micro-batch leaves in it until its backward pass.
    `buffers` is room for buffers and arriving gradients; a rank needs it for its largest stage. `taken` is
    room for the backward pass of a layer, which frees what later layers of its stage have left.
    """

    states: Floats
    left: Floats
    buffers: Floats
    taken: Floats

    def of_each(self, stages: int) -> LayerBytes:
        """Divide the room that a device's `stages` use in turn equally among them."""
        return self._replace(buffers=self.buffers / stages, taken=self.taken / stages)


class Bounds:
    """Lower bounds for the layouts of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        job = problem.job
        self._state_bytes = state_bytes(job.precision, job.optimizer, reduce_precision=job.reduce_precision)
        self._optimizer_bytes = job.optimizer.kept_bytes(STEPPED_BYTES[job.precision])
        memory = problem.measurements.memory
        self._memory_factor = memory.factor
        # Half-widths of the declared intervals of bytes that are left free.
        self._margin = memory.widening * margin_at(problem.memory_risk)
        self._costs = LeastCosts(problem)
        self._partitions: dict[_CutKey, Ints] = {}
        self._resident_states: dict[tuple[_CutKey, str, int, str, int, tuple[int, ...]], Ints] = {}
        self._kept: dict[tuple[str, str, Pipeline], KeptMicroBatches] = {}
        self._steps_s: dict[Hashable, float] = {}

    @property
    def largest_memory_bytes(self) -> int:
        return max(group.device.usable_bytes for group in self._problem.job.cluster.groups)

    def may_fit(self, layout: Layout) -> bool:
        """Return True unless a device would hold too much for the largest one, at the problem's risk."""
        return bool(self.held_at_risk(layout).max() <= self.largest_memory_bytes)

    def held_at_risk(self, layout: Layout) -> Ints:
        """Return the bytes that each device's holding exceeds with the problem's `memory_risk`.

        They have half-widths of the 90 % intervals of states and activations on top; shape (devices,).
        """
        resident, activations = self.holdings(layout)
        spread = RESIDENT_SPREAD * resident + LIVE_SPREAD * activations
        return resident + activations + np.rint(self._margin * spread).astype(np.int64)

    def layer_seconds(self, layout: Layout) -> list[float]:
        """Return the weights of the layers for balancing stages."""
        layers = self._costs.of(layout)
        return list(np.maximum(layers.forward_s + layers.backward_s, layers.issue_s).tolist())

    def stage_seconds(self, layout: Layout) -> list[float]:
        """Return the seconds of one micro-batch forward and backward in each stage, on the fastest device.

        Raises:
            InputError: see `step_s`.
        """
        return list((self._both_s(layout) / self._problem.job.cluster.highest_speed).tolist())

    def step_s(self, layout: Layout) -> float:
        """Return a lower bound of the step in seconds, valid for every order.

        Some device waits while the stages before its first one fill. It runs all its micro-batches, then
        waits while these stages drain. Where backwards run in two parts, left-over weight parts may hide the
        drain and the next fill.

        Raises:
            InputError: when a profile was not measured at this tensor degree.
        """
        pipeline = pipeline_of(self._problem.job, layout)
        # Whatever replicas share out, they compute the same.
        computed = layout.recompute, layout.recompute_per_stage, layout.splits
        key = (*self._cut_key(layout), layout.schedule, str(layout.options), pipeline, *computed)
        if key not in self._steps_s:
            self._steps_s[key] = self._computed_s(layout, pipeline)
        return self._steps_s[key]

    def _computed_s(self, layout: Layout, pipeline: Pipeline) -> float:
        both, placement = self._both_s(layout), self.placement(layout)
        # A stage hands on the first part of a split micro-batch before it begins the next part.
        waits = both * (not self._splits_backward(layout)) / (layout.splits or 1.0)
        share = pipeline.micro_batches // len(placement)
        computed = np.tile(both, len(placement))
        work = share * np.bincount(placement.ravel(), weights=computed, minlength=pipeline.devices)
        filled = np.full(pipeline.devices, np.inf)
        np.minimum.at(filled, placement, np.broadcast_to(self._before(layout, waits), placement.shape))
        return float((work + filled).max()) / self._problem.job.cluster.highest_speed

    def _before(self, layout: Layout, waits: Floats) -> Floats:
        """Return the seconds before each stage gets its first micro-batch; stage i takes `waits[i]`."""
        edges = self._edges(layout)
        if edges is None:
            return np.cumsum(waits) - waits
        before = np.zeros(layout.stages)
        for producer, consumer in edges:
            before[consumer] = max(before[consumer], before[producer] + waits[producer])
        return before

    def _edges(self, layout: Layout) -> tuple[tuple[int, int], ...] | None:
        """Return the edges of the layout's stage graph, sorted; None for layers in a chain."""
        graph = self._problem.job.graph
        if graph.is_chain:
            return None
        return tuple(sorted(graph.crossing(starmap(range, pairwise(self._cuts(layout).tolist())))))

    def resident_bytes(self, layout: Layout) -> int:
        """Return the bytes of states and buffers that the fullest device of the layout holds all the time."""
        return int(self._resident(layout).max())

    def holding(self, layout: Layout) -> Holding:
        """Return the holding of the fullest device; see `holdings`."""
        resident, activations = self.holdings(layout)
        fullest = int(np.argmax(resident + activations))
        return Holding(resident=int(resident[fullest]), activations=int(activations[fullest]))

    def holdings(self, layout: Layout) -> tuple[Ints, Ints]:
        """Return the bytes of states, and of activations, that each device of a pipeline holds at once.

        Both have shape (devices,).
        """
        layers = self._costs.of(layout)
        whole = with_slack(self._by_stage(layout, layers.kept).astype(np.int64))
        left = with_slack(self._as_recomputed(layout, layers.left).astype(np.int64))
        taken = with_slack(self._taken(layout).astype(np.int64))
        left[list(self._away(layout)[1])] = 0
        return self._resident(layout), self._corrected(self._kept_of(layout).most(left, whole, taken))

    def most_in_flight(self, layout: Layout) -> Ints:
        """Return the most micro-batches that each device of a pipeline keeps at once, shape (devices,)."""
        one = np.ones(layout.stages, dtype=np.int64)
        return self._kept_of(layout).most(one, one, 0 * one)

    def layer_bytes(self, layout: Layout) -> LayerBytes:
        """Return the bytes that each layer holds on a rank of the layout.

        They include the allocator's slack, the margin of the problem's `memory_risk`, and the correction by
        measured peaks.
        """
        layers, states = self._costs.of(layout), self._state_bytes
        sharers, level = sharers_of(layout), SHARDINGS.index(layout.sharding)
        each = sum(size / (sharers if turn < level else 1) for turn, size in enumerate(states.in_turn))
        resident, live = (
            self._memory_factor * (1.0 + ALLOCATOR_SLACK) * (1.0 + self._margin * spread)
            for spread in (RESIDENT_SPREAD, LIVE_SPREAD)
        )
        arriving = states.arriving if sharers > 1 else 0
        states_away, activations_away = (len(set(one)) == layout.stages for one in self._away(layout))
        if states_away:
            each -= self._optimizer_bytes / (sharers if level else 1)
        buffers = arriving + buffered_bytes(states, layout.sharding) * min(layout.loops, SHARDED_BUFFERS)
        return LayerBytes(
            states=resident * (each * layers.parameters + layers.frozen),
            left=(0.0 if activations_away else live) * layers.left(layout.recompute),
            buffers=resident * buffers * layers.parameters,
            taken=live * layers.taken(layout.recompute),
        )

    def exchanged_bytes(self, layout: Layout) -> tuple[Floats, Floats]:
        """Return the bytes of each layer's gradients and weights that replicas exchange; shapes (layers,)."""
        parameters, states = self._costs.of(layout).parameters, self._state_bytes
        return states.reduced * parameters, states.weights * parameters

    def pass_seconds(self, layout: Layout) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the seconds of one micro-batch in each stage: forward, backward, and both parts of that.

        Beside exchanges with other ranks, they are those of devices that do not wait for their hosts.

        Raises:
            InputError: see `step_s`.
        """
        speed, layers = self._problem.job.cluster.highest_speed, self._costs.of(layout)
        own_s = self._own_s(layout)
        pace = self._both_s(layout) / own_s if layout.width == 1 else np.ones_like(own_s)
        forward_s, weight_s = (
            pace * self._by_stage(layout, one) / speed for one in (layers.forward_s, layers.weight_s)
        )
        backward_s = pace * own_s / speed - forward_s
        return forward_s, backward_s, backward_s - weight_s, weight_s

    def exchanged_by_stage(self, layout: Layout) -> tuple[list[int], list[int]]:
        """Return the bytes of each stage's gradients and weights that replicas exchange."""
        gradients, weights = (
            self._by_stage(layout, one).round().astype(np.int64).tolist()
            for one in self.exchanged_bytes(layout)
        )
        return gradients, weights

    def layers_of_stages(self, layout: Layout) -> Ints:
        """Return the number of layers of each stage."""
        return np.diff(self._cuts(layout))

    def message_bytes(self, layout: Layout) -> list[int]:
        """Return the bytes of a message after each stage but the last, in a chain."""
        sent = self._problem.job.graph.amounts("sent", layout.shape(self._problem.job.sequence))
        return [round(self.element_bytes * sent[last - 1]) for last in self._cuts(layout)[1:-1].tolist()]

    def _splits_backward(self, layout: Layout) -> bool:
        """Return True if the order runs backwards in two parts. Short pipelines, which are quick to make,
        show it for weft's own orders, but not for others."""
        if layout.schedule in SCHEDULES:
            return splits_backward(layout.schedule, layout.pp)
        return bool(self._kept_of(layout).whole.any())

    def _both_s(self, layout: Layout) -> Floats:
        """Return the seconds of one micro-batch forward and backward in each stage, at speed 1.

        A device is no faster than its host. Kernels of selective recomputation are left out.
        """
        layers = self._costs.of(layout)
        again_s = self._as_recomputed(layout, lambda word: layers.issue_again_s * (word == "full"))
        return np.maximum(self._own_s(layout), self._by_stage(layout, layers.issue_s) + again_s)

    def _own_s(self, layout: Layout) -> Floats:
        """Return the seconds of `_both_s` on a device that does not wait for its host."""
        layers = self._costs.of(layout)
        both = self._by_stage(layout, layers.forward_s) + self._by_stage(layout, layers.backward_s)
        return both + self._as_recomputed(layout, layers.again_s)

    def _resident(self, layout: Layout) -> Ints:
        """Return bytes per device of a pipeline in states and buffers."""
        # The slack of states that are away is rounded by itself.
        return self._corrected(with_slack(self._states(layout)) - bool(self._away(layout)[0]))

    def _corrected(self, held: Ints) -> Ints:
        """Return predicted bytes as measured peaks correct them, rounded down."""
        return held if self._memory_factor == 1.0 else (self._memory_factor * held).astype(np.int64)

    def _states(self, layout: Layout) -> Ints:
        """Return bytes of states and buffers per device of a pipeline, without slack."""
        sharers = sharers_of(layout)
        away = tuple(self._away(layout)[0])
        key = (self._cut_key(layout), layout.schedule, layout.loops, layout.sharding, sharers, away)
        if key not in self._resident_states:
            parameters = self._by_stage(layout, self._costs.of(layout).parameters).astype(np.int64)
            stages = _by_local_stage(self.placement(layout), parameters, sharers)
            held = resident_states(stages, layout.pp, self._state_bytes, layout.sharding).total
            placement, shards = self.placement(layout), sharers if layout.sharding != "zero-0" else 1
            frozen = self._by_stage(layout, self._costs.of(layout).frozen).astype(np.int64)
            np.add.at(held, placement, np.broadcast_to(frozen, placement.shape))
            for stage in away:
                np.subtract.at(
                    held, placement[:, stage], self._optimizer_bytes * -(-parameters[stage] // shards)
                )
            self._resident_states[key] = held
        return self._resident_states[key]

    def _away(self, layout: Layout) -> tuple[Sequence[int], Sequence[int]]:
        """Return the stages whose optimizer states, and those whose activations, are off their devices."""
        methods = layout.methods_beside(self._problem.job.methods)
        each = [one.stages(methods, layout.stages) for one in parts(KeptAway)] if methods else []
        states, activations = (sorted({stage for one in each for stage in one[kind]}) for kind in (0, 1))
        return states, activations

    def placement(self, layout: Layout) -> Ints:
        """Return the device of each stage on each path, shape (paths, stages)."""
        return placements(get_schedule(layout.schedule), pipeline_of(self._problem.job, layout))

    def _kept_of(self, layout: Layout) -> KeptMicroBatches:
        pipeline = pipeline_of(self._problem.job, layout)
        if (edges := self._edges(layout)) is not None:
            pipeline = replace(pipeline, edges=edges)
        key = (layout.schedule, str(layout.options), pipeline)
        if key not in self._kept:
            schedule = get_schedule(layout.schedule)
            self._kept[key] = KeptMicroBatches.of(
                [schedule.order(pipeline, device, layout.options) for device in range(pipeline.devices)]
            )
        return self._kept[key]

    def _by_stage(self, layout: Layout, of_layers: Floats) -> Floats:
        return np.add.reduceat(of_layers, self._cuts(layout)[:-1])

    def _as_recomputed(
        self, layout: Layout, of: Callable[[Recompute], Floats], join: np.ufunc = np.add
    ) -> Floats:
        """Reduce layer values to stages with `join`, each stage by its own recomputation; shape (stages,)."""
        cuts, words = self._cuts(layout)[:-1], layout.recomputes
        joined = {word: join.reduceat(of(word), cuts) for word in set(words)}
        return np.array([joined[word][stage] for stage, word in enumerate(words)])

    def _taken(self, layout: Layout) -> Floats:
        """Return the bytes that the backward pass of each stage takes beside those that were left."""
        layers, cuts = self._costs.of(layout), self._cuts(layout)

        def before_freed(word: Recompute) -> Floats:
            left = np.cumsum(layers.left(word))
            freed = np.repeat(left[cuts[1:] - 1], np.diff(cuts)) - left
            return layers.taken(word) - freed

        return np.maximum(self._as_recomputed(layout, before_freed, np.maximum), 0.0)

    def _cut_key(self, layout: Layout) -> _CutKey:
        loss = layout.loss, layout.loss_chunk_tokens
        return layout.shape(self._problem.job.sequence), *loss, layout.stages, layout.layers_per_stage

    def _cuts(self, layout: Layout) -> Ints:
        """Return the first layer of every stage, then the number of layers, as `build_plan` cuts them."""
        key = self._cut_key(layout)
        if key not in self._partitions:
            parts = parts_of(layout, self.layer_seconds(layout))
            self._partitions[key] = np.cumsum([0, *(len(part) for part in parts)])
        return self._partitions[key]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a message."""
        return PRECISION_BYTES[self._problem.job.precision]


def _by_local_stage(placement: Ints, parameters: Ints, replicas: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield the first stages of all devices, then the second ones and so on, for `resident_states`."""
    # Sorted by stage, so that a device's stages rise.
    devices, sizes = placement.T.ravel(), np.repeat(parameters, len(placement))
    order = np.argsort(devices, kind="stable")
    first = np.searchsorted(devices[order], devices[order])
    local = np.arange(len(order)) - first
    for turn in range(int(local.max()) + 1):
        rows = order[local == turn]
        yield devices[rows], sizes[rows], replicas
