"""AMP's inputs from weft's own models of computation and links."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.device import PRECISION_BYTES
from weft.planning.planners.amp.inputs import AmpInputs, Floats
from weft.planning.planners.degrees import beside_blocks
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem
from weft.predict.cost.memory import state_bytes


def amp_inputs(problem: Problem, tensor_degrees: Iterable[int]) -> AmpInputs:
    """What AMP sees of a problem, at these tensor-parallel degrees.

    Kinds of devices are averaged into one profile, each by its share of the nodes. Latencies do not count.
    Gradients are all of a layer's; those of embeddings that a head uses too are `shared_bytes`.

    Raises:
        InputError: when a profile was not measured at one of the degrees.
    """
    job, times = problem.job, ProblemLayerTimes(problem)
    degrees = tuple(tensor_degrees)
    shapes = {degree: Shape(1, job.sequence, degree) for degree in degrees}
    element, gradient = PRECISION_BYTES[job.precision], state_bytes(job.precision).gradients
    tied = job.graph.tied[:1]
    parameters = {
        degree: np.array([layer.parameters(shape) for layer in job.graph.layers])
        for degree, shape in shapes.items()
    }
    for one in tied:
        for degree, shape in shapes.items():
            parameters[degree][one.layers[0]] -= one.parameters(shape)
    leading, trailing = beside_blocks(problem)
    return AmpInputs(
        devices=tuple(group.devices for group in job.cluster.groups for _ in range(group.count)),
        bandwidth=node_bandwidths(job.cluster),
        global_batch=job.global_batch,
        forward_s={degree: tuple(_averaged(problem, times, degree).tolist()) for degree in degrees},
        sent_bytes={
            degree: tuple(element * layer.sent(shape) for layer in job.graph.layers)
            for degree, shape in shapes.items()
        },
        gradient_bytes={degree: tuple((gradient * parameters[degree]).tolist()) for degree in degrees},
        shared_layers=tuple(layer for one in tied for layer in one.layers),
        shared_bytes={
            degree: gradient * sum(one.parameters(shape) for one in tied) for degree, shape in shapes.items()
        },
        leading=leading,
        trailing=trailing,
    )


def _averaged(problem: Problem, times: ProblemLayerTimes, tensor_parallel: int) -> Floats:
    """Seconds of the forward pass of one sample in each layer, of all kinds of devices by nodes."""
    cluster = problem.job.cluster
    nodes = sum(group.count for group in cluster.groups)
    seconds = np.zeros(len(problem.job.graph.layers))
    for index, group in enumerate(cluster.groups):
        slowness = np.mean([1.0 / speed for speed in group.speeds or (1.0,)])
        seconds += group.count / nodes * slowness * times.of_group(index, 1, tensor_parallel).forward_s
    return seconds


def node_bandwidths(cluster: Cluster) -> Floats:
    """Bytes/s between devices of all pairs of nodes, and of each node; shape (nodes, nodes)."""
    counts = [group.count for group in cluster.groups]
    table = np.array(
        [
            [
                cluster.links[_pair(one.name, other.name)].bytes_per_s
                if (_pair(one.name, other.name)) in cluster.links
                else one.link.bytes_per_s
                for other in cluster.groups
            ]
            for one in cluster.groups
        ]
    )
    nodes: Floats = np.repeat(np.repeat(table, counts, axis=0), counts, axis=1)
    inside = [group.link.bytes_per_s for group in cluster.groups]
    np.fill_diagonal(nodes, np.repeat(inside, counts))
    return nodes


def _pair(name: str, other: str) -> tuple[str, str]:
    return (name, other) if name <= other else (other, name)
