"""What one micro-batch costs in every layer of a problem, at its least: the material of lower bounds.

Layers are evaluated once per shape of a micro-batch, on the fastest kind of device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.layout import Layout
from weft.describe.plan import Recompute
from weft.planning.problem import Problem
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.keeping import keeping_of
from weft.predict.cost.memory import stage_product_bytes

Floats = npt.NDArray[np.float64]


class LayerCosts(NamedTuple):
    """One micro-batch through every layer: seconds of its passes, bytes it leaves, parameters of a rank.

    All of shape (layers,). Seconds contain the all-reduces of tensor ranks; `kept` is what backward passes
    need, `inputs` what they can be recomputed from, `products` what is kept beside it where only what is no
    product is recomputed.
    """

    forward_s: Floats
    backward_s: Floats
    kept: Floats
    inputs: Floats
    products: Floats
    without_products_s: Floats
    parameters: Floats

    def again_s(self, recompute: Recompute) -> Floats:
        """Seconds of what backward passes run again."""
        return keeping_of(recompute).again_s(self)

    def left(self, recompute: Recompute) -> Floats:
        """Bytes that a micro-batch leaves between its passes."""
        return keeping_of(recompute).left(self)

    def made(self, recompute: Recompute) -> Floats:
        """Bytes that a backward pass makes again of the layer that it is in."""
        return np.maximum(keeping_of(recompute).made(self), 0.0)


class LeastCosts:
    """The layers of one problem, each kind of layer evaluated once per shape."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        cluster, precision = problem.job.cluster, problem.job.precision
        self._fastest = max(
            (group.device for group in cluster.groups),
            key=lambda device: device.flops_per_s.get(precision, 0.0),
        )
        self._compute, self._network = problem.cost_model.compute, problem.cost_model.network
        self._layers: dict[Shape, LayerCosts] = {}

    def of(self, layout: Layout) -> LayerCosts:
        """The costs of a micro-batch of the layout.

        Raises:
            InputError: when a profile was not measured at this micro-batch size or tensor degree.
        """
        shape = layout.shape(self._problem.job.sequence)
        if shape not in self._layers:
            self._layers[shape] = self._evaluated(shape)
        return self._layers[shape]

    def _evaluated(self, shape: Shape) -> LayerCosts:
        alike = self._problem.job.graph.alike
        known = {index: self._evaluate(index, shape) for index in dict.fromkeys(alike)}
        return LayerCosts(*np.array([known[index] for index in alike], dtype=np.float64).T)

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
            again_s + reduced_s,
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
