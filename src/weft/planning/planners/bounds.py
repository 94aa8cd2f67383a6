"""Lower bounds of the step time and the memory of layouts, without simulating them.

Layers are evaluated once per shape of a micro-batch, orders are made once per pipeline. What context ranks
exchange is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.layer_graph import Layer
from weft.moves.layout import Layout, parts_of, pipeline_of, replicas_of
from weft.planning.planners.space import splits_backward
from weft.planning.problem import Problem
from weft.predict.cost.compute import ComputeModel, StageTimes
from weft.predict.cost.memory import (
    ALLOCATOR_SLACK,
    SHARDINGS,
    resident_bytes,
    stage_product_bytes,
    state_bytes,
    with_slack,
)
from weft.predict.cost.network import Network
from weft.predict.cost.residency import kept_changes
from weft.program.program import Ints
from weft.program.schedules import get_schedule
from weft.program.schedules.base import ComputeOrder, Pipeline, placements

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The least that the fullest device of a layout holds at its peak, in bytes."""

    resident: int
    activations: int

    @property
    def total(self) -> int:
        return self.resident + self.activations


class LayerBytes(NamedTuple):
    """Bytes of every layer on a rank, each of shape (layers,): its states, what a micro-batch leaves in it
    until its backward pass, and room for arriving gradients, which a rank needs for its largest stage."""

    states: Floats
    left: Floats
    gradients: Floats


class _Layers(NamedTuple):
    """One micro-batch through every layer: seconds of its passes, bytes it leaves, parameters of a rank.

    All of shape (layers,). `forward` and `backward` contain the all-reduces of tensor ranks; `kept` is what
    backward passes need, `inputs` what they can be recomputed from, `products` what is kept beside it where
    only what is no product is recomputed, which takes `again`.
    """

    forward: Floats
    backward: Floats
    kept: Floats
    inputs: Floats
    products: Floats
    again: Floats
    parameters: Floats


class Bounds:
    """Lower bounds for the layouts of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        cluster, precision = problem.job.cluster, problem.job.precision
        self._fastest = max(
            (group.device for group in cluster.groups),
            key=lambda device: device.flops_per_s.get(precision, 0.0),
        )
        self._compute = ComputeModel(machine=problem.machine, profile=problem.profile)
        self._network = Network(cluster=cluster, machine=problem.machine)
        self._layers: dict[Shape, _Layers] = {}
        self._partitions: dict[tuple[Shape, int, tuple[int, ...] | None], Ints] = {}
        self._orders: dict[tuple[str, Pipeline], list[ComputeOrder]] = {}

    @property
    def largest_memory_bytes(self) -> int:
        return max(group.device.usable_bytes for group in self._problem.job.cluster.groups)

    def layer_seconds(self, layout: Layout) -> list[float]:
        """Weights of the layers for balancing stages."""
        layers = self._layers_of(layout)
        return list((layers.forward + layers.backward).tolist())

    def stage_seconds(self, layout: Layout) -> list[float]:
        """Seconds of one micro-batch forward and backward in each stage, on the fastest device.

        Raises:
            InputError: as `step_s` does.
        """
        layers = self._layers_of(layout)
        both = self._by_stage(layout, layers.forward + layers.backward)
        if layout.recompute != "none":
            both = both + self._by_stage(
                layout, layers.forward if layout.recompute == "full" else layers.again
            )
        return list((both / self._problem.job.cluster.highest_speed).tolist())

    def step_s(self, layout: Layout) -> float:
        """Valid for every order: some device must wait for the stages before its first one to fill, run all
        its micro-batches, and then wait for these stages to drain. Where backwards are computed in two parts,
        weight parts of its own that are left may hide the drain, and how the next step fills.

        Raises:
            InputError: when a profile was not measured at this micro-batch size or tensor degree.
        """
        layers = self._layers_of(layout)
        forward = self._by_stage(layout, layers.forward)
        both = forward + self._by_stage(layout, layers.backward)
        if layout.recompute != "none":
            both = both + (forward if layout.recompute == "full" else self._by_stage(layout, layers.again))
        waits = both * (not splits_backward(layout.schedule, layout.pipeline_parallel))
        pipeline, placement = self._placed(layout)
        share = pipeline.micro_batches // len(placement)
        computed = np.tile(both, len(placement))
        work = share * np.bincount(placement.ravel(), weights=computed, minlength=pipeline.devices)
        filled = np.full(pipeline.devices, np.inf)
        before = np.cumsum(waits) - waits
        np.minimum.at(filled, placement, np.broadcast_to(before, placement.shape))
        return float((work + filled).max()) / self._problem.job.cluster.highest_speed

    def resident_bytes(self, layout: Layout) -> int:
        """What the fullest device of the layout holds all the time in states and buffers."""
        return int(self._resident(layout).max())

    def holding(self, layout: Layout) -> Holding:
        """The device that holds most: its states, and the activations that its order keeps at once."""
        layers = self._layers_of(layout)
        whole = with_slack(self._by_stage(layout, layers.kept).astype(np.int64))
        left = whole
        if layout.recompute != "none":
            kept = layers.inputs + (layers.products if layout.recompute == "selective" else 0.0)
            left = with_slack(self._by_stage(layout, kept).astype(np.int64))
        holdings = [
            Holding(resident=resident, activations=_most_kept(order, left, whole))
            for resident, order in zip(self._resident(layout).tolist(), self._orders_of(layout), strict=True)
        ]
        return max(holdings, key=lambda holding: holding.total)

    def layer_bytes(self, layout: Layout) -> LayerBytes:
        """What each layer holds on a rank of the layout, allocator's slack included; without buffers."""
        layers, states = self._layers_of(layout), state_bytes(self._problem.job.precision)
        sharers, level = layout.island or replicas_of(layout), SHARDINGS.index(layout.sharding)
        parts = zip((states.optimizer, states.gradients, states.weights), (1, 2, 3), strict=True)
        each = sum(size / (sharers if level >= first else 1) for size, first in parts)
        left = layers.kept
        if layout.recompute != "none":
            left = layers.inputs + (layers.products if layout.recompute == "selective" else 0.0)
        slack = 1.0 + ALLOCATOR_SLACK
        arriving = states.gradients if sharers > 1 else 0
        return LayerBytes(
            states=slack * each * layers.parameters,
            left=slack * left,
            gradients=slack * arriving * layers.parameters,
        )

    def _resident(self, layout: Layout) -> Ints:
        """Per device of one pipeline; states, buffers and the one layer being recomputed, with slack."""
        pipeline, placement = self._placed(layout)
        layers = self._layers_of(layout)
        parameters = self._by_stage(layout, layers.parameters).astype(np.int64)
        stages = _by_local_stage(placement, parameters, layout.island or replicas_of(layout))
        states = state_bytes(self._problem.job.precision)
        held = resident_bytes(stages, pipeline.devices, states, layout.sharding)
        if layout.recompute != "none":
            made = layers.kept - (layers.products if layout.recompute == "selective" else 0.0)
            largest = np.maximum.reduceat(np.maximum(made, 0.0), self._cuts(layout)[:-1])
            room = np.zeros_like(held)
            np.maximum.at(room, placement, np.broadcast_to(largest.astype(np.int64), placement.shape))
            held = held + room
        return with_slack(held)

    def _placed(self, layout: Layout) -> tuple[Pipeline, Ints]:
        """The pipeline, and the device of each stage on each path, shape (paths, stages)."""
        pipeline = pipeline_of(self._problem.job, layout)
        return pipeline, placements(get_schedule(layout.schedule), pipeline)

    def _orders_of(self, layout: Layout) -> list[ComputeOrder]:
        pipeline = pipeline_of(self._problem.job, layout)
        key = (layout.schedule, pipeline)
        if key not in self._orders:
            schedule = get_schedule(layout.schedule)
            self._orders[key] = [
                schedule.order(pipeline, device, layout.options) for device in range(pipeline.devices)
            ]
        return self._orders[key]

    def _by_stage(self, layout: Layout, of_layers: Floats) -> Floats:
        sums: Floats = np.add.reduceat(of_layers, self._cuts(layout)[:-1])
        return sums

    def _cuts(self, layout: Layout) -> Ints:
        """First layer of every stage, then the number of layers; stages are as `build_plan` cuts them."""
        key = (self.shape(layout), layout.stages, layout.layers_per_stage)
        if key not in self._partitions:
            parts = parts_of(layout, self.layer_seconds(layout))
            self._partitions[key] = np.cumsum([0, *(len(part) for part in parts)])
        return self._partitions[key]

    def _layers_of(self, layout: Layout) -> _Layers:
        shape = self.shape(layout)
        if shape not in self._layers:
            self._layers[shape] = self._evaluated(shape)
        return self._layers[shape]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a message."""
        return PRECISION_BYTES[self._problem.job.precision]

    def shape(self, layout: Layout) -> Shape:
        """What a rank of the layout computes of a micro-batch."""
        sequence, degrees = self._problem.job.sequence, (layout.tensor_parallel, layout.context_parallel)
        return Shape(layout.micro_batch_size, sequence, *degrees)

    def _evaluated(self, shape: Shape) -> _Layers:
        job = self._problem.job
        known: dict[Layer, tuple[float, ...]] = {}
        rows = []
        for index, layer in enumerate(job.graph.layers):
            # Layers that differ only in their name cost the same.
            alike = replace(layer, name="")
            if alike not in known:
                known[alike] = self._evaluate(index, shape)
            rows.append(known[alike])
        return _Layers(*np.array(rows, dtype=np.float64).T)

    def _evaluate(self, index: int, shape: Shape) -> tuple[float, ...]:
        job, one = self._problem.job, (index,)
        times = self._compute.stage_times(job.graph, one, shape, job.precision, self._fastest)
        reduced_s = self._tensor_s(index, shape)
        kept = [
            self._compute.all_kept_bytes(job.graph, one, shape, job.precision, group.device)
            for group in job.cluster.groups
        ]
        inputs = self._compute.kept_bytes(job.graph, one, shape, job.precision, self._fastest, "full")
        products, again_s = self._selectively(index, shape, times)
        return (
            times.forward_s + reduced_s,
            times.backward_input_s + times.backward_weight_s + reduced_s,
            min(kept),
            inputs,
            products,
            again_s,
            round(job.graph.layers[index].parameters(shape)),
        )

    def _selectively(self, index: int, shape: Shape, kept: StageTimes) -> tuple[float, float]:
        """What a layer's products leave, and seconds to make the rest again; 0 where it is not known."""
        job, one = self._problem.job, (index,)
        if job.graph.layers[index].products is None:
            return 0.0, 0.0
        again = self._compute.stage_times(
            job.graph, one, shape, job.precision, self._fastest, recompute="selective"
        )
        return (
            stage_product_bytes(job.graph, one, shape, job.precision),
            again.backward_input_s - kept.backward_input_s,
        )

    def _tensor_s(self, index: int, shape: Shape) -> float:
        """Seconds of a layer's all-reduce over neighbouring ranks; 0 where these may sit on several nodes, or
        where times contain them."""
        job = self._problem.job
        if self._compute.contains_exchanges(self._fastest, shape):
            return 0.0
        elements = job.graph.layers[index].tensor_reduced(shape)
        degree = shape.tensor_parallel
        if degree == 1 or not elements or any(group.devices % degree for group in job.cluster.groups):
            return 0.0
        size = round(elements * PRECISION_BYTES[job.precision])
        firsts = np.cumsum([0, *(group.count * group.devices for group in job.cluster.groups[:-1])])
        return min(
            self._network.all_reduce_s(range(first, first + degree), size) for first in firsts.tolist()
        )


def _most_kept(order: ComputeOrder, left: Ints, whole: Ints) -> int:
    """Most bytes of activations at once in an order; `left` by a forward, `whole` needed by a weight part."""
    change = np.zeros(len(order.kind), dtype=np.int64)
    for kind, by_stage in kept_changes(left, whole).items():
        rows = order.kind == kind
        change[rows] = by_stage[order.stage[rows]]
    return int(np.cumsum(change).max(initial=0))


def _by_local_stage(placement: Ints, parameters: Ints, replicas: int) -> Iterator[tuple[Ints, Ints, int]]:
    """The first stages of all devices, then the second ones and so on, as `resident_bytes` takes them."""
    # Stage by stage, so that a device's stages rise.
    devices, sizes = placement.T.ravel(), np.repeat(parameters, len(placement))
    order = np.argsort(devices, kind="stable")
    first = np.searchsorted(devices[order], devices[order])
    local = np.arange(len(order)) - first
    for turn in range(int(local.max()) + 1):
        rows = order[local == turn]
        yield devices[rows], sizes[rows], replicas
