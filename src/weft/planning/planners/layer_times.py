"""Costs of one micro-batch in every layer of a problem: on each kind of device, and at the least.

Exchanges between tensor ranks are included. Each kind of layer is evaluated once per device and shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES, Device
from weft.describe.layer_choices import with_choices
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.loss_choice import WHOLE, Loss, loss_choices
from weft.describe.plan import Recompute
from weft.describe.servers import without_servers
from weft.planning.problem import Problem
from weft.predict.cost.compute import StageTimes, StageWork
from weft.predict.cost.keeping import keeping_of
from weft.program.arrays import Floats


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch in each layer, all of shape (layers,). `without_products_s` is the part that
    selective recomputation runs again (0 where it is not known)."""

    forward_s: Floats
    backward_s: Floats
    without_products_s: Floats

    @property
    def both_s(self) -> Floats:
        return self.forward_s + self.backward_s

    def again_s(self, recompute: Recompute) -> Floats:
        """Return the seconds that backward passes recompute."""
        return keeping_of(recompute).again_s(self)


class LayerCosts(NamedTuple):
    """The costs of one micro-batch in every layer, all of shape (layers,).

    Seconds are the same as in `PassSeconds`; `weight_s` is the weight part of `backward_s`. A host needs
    `issue_s` for the kernels of both passes, and `issue_again_s` for those of a recomputed forward pass. It
    may run ahead from layer to layer. `kept` is the bytes that backward passes need, `inputs` the bytes from
    which they can recompute these. `products` is kept too where all but products is recomputed;
    `freed_products` is the part of it that is not in `kept`. Backward passes take `temporaries` besides, and
    `later_temporaries` after they have recomputed everything.
    `parameters` are the trained ones of a rank, and `frozen` the bytes of the others.
    """

    forward_s: Floats
    backward_s: Floats
    without_products_s: Floats
    weight_s: Floats
    issue_s: Floats
    issue_again_s: Floats
    kept: Floats
    inputs: Floats
    products: Floats
    freed_products: Floats
    temporaries: Floats
    later_temporaries: Floats
    parameters: Floats
    frozen: Floats

    def again_s(self, recompute: Recompute) -> Floats:
        """Return the seconds that backward passes recompute."""
        return keeping_of(recompute).again_s(self)

    def left(self, recompute: Recompute) -> Floats:
        """Return the bytes that a micro-batch leaves between its passes."""
        return keeping_of(recompute).left(self)

    def taken(self, recompute: Recompute) -> Floats:
        """Return the bytes that a backward pass takes for its current layer, beside those that were left."""
        return keeping_of(recompute).taken(self)


class _ProblemLayers:
    """The layers of one problem, evaluated one by one."""

    def __init__(self, problem: Problem, graph: LayerGraph | None = None) -> None:
        self._job = problem.job
        self._graph = problem.job.graph if graph is None else graph
        self._compute, self._network = problem.cost_model.compute, problem.cost_model.network

    def _of_each(self, values_of: Callable[[int], tuple[float, ...]]) -> Floats:
        """Return the values of every layer, shape (values, layers)."""
        alike = self._graph.alike
        known = {index: values_of(index) for index in dict.fromkeys(alike)}
        return np.array([known[index] for index in alike], dtype=np.float64).T

    def _passes_s(self, index: int, shape: Shape, device: Device, reduced_s: float) -> tuple[float, ...]:
        """Return a layer's `PassSeconds` with exchanges of `reduced_s` seconds in each pass."""
        times, again_s = self._times(index, shape, device, reduced_s, "none"), 0.0
        if self._graph.layers[index].products is not None:
            again = self._times(index, shape, device, reduced_s, "selective")
            again_s = again.passes_s - times.passes_s + reduced_s
        backward_s = times.backward_input_s + times.backward_weight_s + reduced_s
        return times.forward_s + reduced_s, backward_s, again_s

    def _times(
        self, index: int, shape: Shape, device: Device, reduced_s: float, recompute: Recompute
    ) -> StageTimes:
        """Return the times of a stage of one layer, at least."""
        job = self._job
        return self._compute.stage_times(
            self._graph, (index,), shape, job.precision, device, recompute=recompute, launch=job.launch
        )

    def _all_reduce_s(self, group: int, degree: int, reduced_bytes: int) -> float:
        """Return the seconds of an all-reduce over the first tensor ranks of a group of nodes.

        A group with fewer devices takes those before it, too.
        """
        cluster = self._job.cluster
        first = sum(before.count * before.devices for before in cluster.groups[:group])
        first = min(first, cluster.ranks - degree)
        return self._network.all_reduce_s(range(first, first + degree), reduced_bytes)


class ProblemLayerTimes(_ProblemLayers):
    """Times on the devices of each group of nodes."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._known: dict[tuple[int, Shape], PassSeconds] = {}

    def of_group(self, group: int, micro_batch_size: int, tensor_parallel: int) -> PassSeconds:
        """Return the times on the devices of a group of nodes, at the speed of its `device`.

        Raises:
            InputError: when a profile was not measured at this tensor degree.
        """
        shape = Shape(micro_batch_size, self._job.sequence, tensor_parallel)
        if (group, shape) not in self._known:
            # Servers compute no layer, perhaps not in this precision: any other times stand for theirs.
            groups = without_servers(self._job.cluster, self._job.servers).groups
            device = groups[min(group, len(groups) - 1)].device
            self._known[group, shape] = PassSeconds(
                *self._of_each(
                    lambda index: self._passes_s(index, shape, device, self._exchanged_s(index, group, shape))
                )
            )
        return self._known[group, shape]

    def updates_s(self, group: int, tensor_parallel: int) -> Floats:
        """Return the seconds in which a device of a group steps each layer, shape (layers,).

        Raises:
            InputError: see `of_group`.
        """
        job = self._job
        shape = Shape(1, job.sequence, tensor_parallel)
        device = without_servers(job.cluster, job.servers).groups[group].device

        def update_s(index: int) -> tuple[float]:
            asked = self._graph, (index,), shape, job.precision, device
            return (self._compute.stage_times(*asked, optimizer=job.optimizer).update_s,)

        seconds: Floats = self._of_each(update_s)[0]
        return seconds

    def _times(
        self, index: int, shape: Shape, device: Device, reduced_s: float, recompute: Recompute
    ) -> StageTimes:
        """Return the times of a stage of one layer, whose device may wait for its host."""
        exchanges = 2 if recompute == "none" else 3
        return super()._times(index, shape, device, reduced_s, recompute).issued(exchanges * reduced_s)

    def _exchanged_s(self, index: int, group: int, shape: Shape) -> float:
        """Return the seconds of a layer's all-reduces on a node; 0 where times contain them."""
        job, layer = self._job, self._graph.layers[index]
        each = layer.tensor_reduced(shape) * PRECISION_BYTES[job.precision] / layer.tensor_exchanges
        contained = self._compute.contains_exchanges(job.cluster.groups[group].device, shape)
        if contained or shape.tensor_parallel == 1 or not each:
            return 0.0
        return layer.tensor_exchanges * self._all_reduce_s(group, shape.tensor_parallel, round(each))


class LeastCosts(_ProblemLayers):
    """Costs on the fastest kind of device: the material of lower bounds."""

    def __init__(self, problem: Problem, graph: LayerGraph | None = None) -> None:
        super().__init__(problem, graph)
        self._problem = problem
        self._of_losses: dict[tuple[Loss, int | None], LeastCosts] = {}
        self._fastest = max(
            (group.device for group in problem.job.cluster.groups),
            key=lambda device: device.flops_per_s.get(problem.job.precision, 0.0),
        )
        self._known: dict[Shape, LayerCosts] = {}

    def of(self, layout: Layout) -> LayerCosts:
        """Return the costs of a micro-batch of the layout.

        Raises:
            InputError: when a profile was not measured at this tensor degree.
        """
        if layout.loss != WHOLE:
            return self._with_loss(layout).of(replace(layout, loss=WHOLE))
        shape = layout.shape(self._job.sequence)
        if shape not in self._known:
            self._known[shape] = LayerCosts(*self._of_each(lambda index: self._costs(index, shape)))
        return self._known[shape]

    def _with_loss(self, layout: Layout) -> LeastCosts:
        """Return the costs with the head and loss of a layout."""
        key = (layout.loss, layout.loss_chunk_tokens)
        if key not in self._of_losses:
            graph = self._graph
            choices = (*self._job.layer_choices, *loss_choices(layout, len(graph.layers) - 1))
            self._of_losses[key] = LeastCosts(self._problem, with_choices(graph, choices))
        return self._of_losses[key]

    def _costs(self, index: int, shape: Shape) -> tuple[float, ...]:
        job, layer = self._job, self._graph.layers[index]
        asked = self._graph, (index,), shape, job.precision
        times = self._times(index, shape, self._fastest, 0.0, "none")
        work = StageWork(self._compute, *asked, self._fastest)
        return (
            *self._passes_s(index, shape, self._fastest, self._exchanged_s(index, shape)),
            times.backward_weight_s,
            times.issue_s,
            self._times(index, shape, self._fastest, 0.0, "full").issue_s - times.issue_s,
            min(self._compute.kept_bytes(*asked, group.device) for group in job.cluster.groups),
            self._compute.kept_bytes(*asked, self._fastest, "full"),
            0.0 if layer.products is None else work.products,
            work.freed_products,
            work.temporaries,
            work.later_temporaries,
            round(layer.parameters(shape)),
            layer.frozen_bytes(shape, PRECISION_BYTES[job.precision]),
        )

    def _exchanged_s(self, index: int, shape: Shape) -> float:
        """Return the seconds of a layer's all-reduce over neighbouring ranks. Return 0 where these may sit on
        several nodes, or where times contain them."""
        groups, degree = self._job.cluster.groups, shape.tensor_parallel
        elements = self._graph.layers[index].tensor_reduced(shape)
        apart = any(group.devices % degree for group in groups)
        if degree == 1 or not elements or apart or self._compute.contains_exchanges(self._fastest, shape):
            return 0.0
        size = round(elements * PRECISION_BYTES[self._job.precision])
        return min(self._all_reduce_s(group, degree, size) for group in range(len(groups)))
