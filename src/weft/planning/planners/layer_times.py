"""Seconds of every layer on every kind of device, exchanges between tensor ranks included."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.layer import Layer
from weft.describe.plan import Recompute
from weft.planning.problem import Problem
from weft.predict.cost.keeping import keeping_of

Floats = npt.NDArray[np.float64]


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch in each layer, all of shape (layers,): forward, backward, and of what is run
    again to recompute selectively (0 where it is not known)."""

    forward_s: Floats
    backward_s: Floats
    without_products_s: Floats

    @property
    def both_s(self) -> Floats:
        both: Floats = self.forward_s + self.backward_s
        return both

    def again_s(self, recompute: Recompute) -> Floats:
        """Seconds of what backward passes run again."""
        return keeping_of(recompute).again_s(self)


class ProblemLayerTimes:
    """Times of one problem's layers; each kind of layer is evaluated once per device, speed and shape."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._compute, self._network = problem.cost_model.compute, problem.cost_model.network
        self._known: dict[tuple[int, Shape], PassSeconds] = {}

    def of_group(self, group: int, micro_batch_size: int, tensor_parallel: int) -> PassSeconds:
        """Times on the devices of a group of nodes, on those of its `device`'s own speed.

        Raises:
            InputError: when a profile was not measured at this micro-batch size or tensor degree.
        """
        shape = Shape(micro_batch_size, self._problem.job.sequence, tensor_parallel)
        if (group, shape) not in self._known:
            alike = self._problem.job.graph.alike
            known = {index: self._evaluated(index, group, shape) for index in dict.fromkeys(alike)}
            self._known[group, shape] = PassSeconds(*np.array([known[index] for index in alike]).T)
        return self._known[group, shape]

    def _evaluated(self, index: int, group: int, shape: Shape) -> tuple[float, float, float]:
        job = self._problem.job
        device = job.cluster.groups[group].device
        times = self._compute.stage_times(job.graph, (index,), shape, job.precision, device)
        exchanged_s = 0.0
        if not self._compute.contains_exchanges(device, shape):
            exchanged_s = self._exchanged_s(job.graph.layers[index], group, shape)
        selected_s = 0.0
        if job.graph.layers[index].products is not None:
            again = self._compute.stage_times(
                job.graph, (index,), shape, job.precision, device, recompute="selective"
            )
            selected_s = again.backward_input_s - times.backward_input_s + exchanged_s
        return (
            times.forward_s + exchanged_s,
            times.backward_input_s + times.backward_weight_s + exchanged_s,
            selected_s,
        )

    def _exchanged_s(self, layer: Layer, group: int, shape: Shape) -> float:
        """Seconds of a layer's all-reduces over tensor ranks that are neighbours on one node."""
        job, degree = self._problem.job, shape.tensor_parallel
        each = layer.tensor_reduced(shape) * PRECISION_BYTES[job.precision] / layer.tensor_exchanges
        if degree == 1 or not each:
            return 0.0
        first = sum(before.count * before.devices for before in job.cluster.groups[:group])
        return layer.tensor_exchanges * self._network.all_reduce_s(range(first, first + degree), round(each))
