"""The inputs of AMP: plain numbers, from weft's own models or from any profiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

import numpy as np

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.device import PRECISION_BYTES
from weft.errors import InputError, Violation
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.planners.space import beside_blocks
from weft.planning.problem import Problem
from weft.predict.cost.memory import state_bytes
from weft.program.arrays import Floats, Ints
from weft.program.schedules.ring import divisors


class Degrees(NamedTuple):
    """The degrees of one strategy; `micro_batches` counts one replica."""

    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    micro_batch_size: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class AmpInputs:
    """A chain of layers on a cluster, in AMP's view.

    The keys of tables are the profiled tensor-parallel degrees; others are not considered.

    Attributes:
        devices: the devices of each node.
        bandwidth: bytes/s between a device of one node and one of another, and on the diagonal between two of
            one node; shape (nodes, nodes). Between nodes AMP itself takes the slower of both nodes' networks:
            `slower_of_both`.
        global_batch: samples per step.
        forward_s: seconds of the forward pass of each layer with a micro-batch of one sample, tensor
            collectives included; one profile for all devices.
        sent_bytes: the bytes of one sample that each layer sends on.
        gradient_bytes: bytes of the gradients of each layer that replicas reduce.
        shared_layers: layers with common further parameters, held once per stage that has any: tied
            embeddings.
        shared_bytes: bytes of the gradients of these parameters.
        leading, trailing: the layers at the ends that are not blocks; they count where layers are divided by
            count.
    """

    devices: tuple[int, ...]
    bandwidth: Floats
    global_batch: int
    forward_s: Mapping[int, tuple[float, ...]]
    sent_bytes: Mapping[int, tuple[float, ...]]
    gradient_bytes: Mapping[int, tuple[float, ...]]
    shared_layers: tuple[int, ...] = ()
    shared_bytes: Mapping[int, float] | None = None
    leading: int = 0
    trailing: int = 0

    def __post_init__(self) -> None:
        problems = [
            Violation(
                f"AMP: {name}",
                f"tensor degrees {_listed(table)} where forward_s has {_listed(self.forward_s)}",
            )
            for name, table in (("sent_bytes", self.sent_bytes), ("gradient_bytes", self.gradient_bytes))
            if set(table) != set(self.forward_s)
        ]
        tables = {
            "forward_s": self.forward_s,
            "sent_bytes": self.sent_bytes,
            "gradient_bytes": self.gradient_bytes,
        }
        problems += [
            Violation(f"AMP: {name}", f"{len(row)} layers at tensor degree {degree}; there are {self.layers}")
            for name, table in tables.items()
            for degree, row in table.items()
            if len(row) != self.layers
        ]
        nodes = len(self.devices)
        if self.bandwidth.shape != (nodes, nodes):
            shape = " x ".join(map(str, self.bandwidth.shape))
            problems.append(Violation("AMP: bandwidth", f"{shape} for {nodes} nodes", f"{nodes} x {nodes}"))
        if problems:
            raise InputError(problems)

    @property
    def layers(self) -> int:
        return len(next(iter(self.forward_s.values()), ()))

    @cached_property
    def node_of_rank(self) -> Ints:
        """Node of every rank where ranks number the devices node by node, shape (ranks,)."""
        return np.repeat(np.arange(len(self.devices)), self.devices)


def slower_of_both(inside: Floats, between: Floats) -> Floats:
    """Return the bandwidths of all pairs of nodes from those inside and out of each node; any unit."""
    table: Floats = np.minimum.outer(between, between)
    np.fill_diagonal(table, inside)
    return table


def degrees_of(inputs: AmpInputs) -> Iterator[Degrees]:
    """Yield every strategy. Tensor ranks divide the devices of every node, replicas the remaining ones, and
    micro-batches the samples of a replica."""
    ranks = sum(inputs.devices)
    for tensor_parallel in divisors(gcd(*inputs.devices)):
        if tensor_parallel not in inputs.forward_s:
            continue
        places = ranks // tensor_parallel
        for data_parallel in divisors(places):
            if inputs.global_batch % data_parallel:
                continue
            samples = inputs.global_batch // data_parallel
            for size in divisors(samples):
                yield Degrees(tensor_parallel, data_parallel, places // data_parallel, size, samples // size)


def _listed(table: Mapping[int, object]) -> str:
    return ", ".join(str(degree) for degree in sorted(table)) or "none"


def amp_inputs(problem: Problem, tensor_degrees: Iterable[int]) -> AmpInputs:
    """Return AMP's inputs for a problem, at these tensor-parallel degrees.

    Kinds of devices are averaged into one profile, each by its share of the nodes. Latencies do not count.
    Gradients are all gradients of a layer, except for tied embeddings: these are `shared_bytes`.

    Raises:
        InputError: when a profile was not measured at one of the degrees.
    """
    job, times = problem.job, ProblemLayerTimes(problem)
    degrees = tuple(tensor_degrees)
    shapes = {degree: Shape(1, job.sequence, degree) for degree in degrees}
    element = PRECISION_BYTES[job.precision]
    gradient = state_bytes(job.precision, reduce_precision=job.reduce_precision).reduced
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
    """Return the seconds of the forward pass of one sample in each layer, averaged over nodes."""
    cluster = problem.job.cluster
    nodes = sum(group.count for group in cluster.groups)
    seconds = np.zeros(len(problem.job.graph.layers))
    for index, group in enumerate(cluster.groups):
        slowness = np.mean([1.0 / speed for speed in group.speeds or (1.0,)])
        seconds += group.count / nodes * slowness * times.of_group(index, 1, tensor_parallel).forward_s
    return seconds


def node_bandwidths(cluster: Cluster) -> Floats:
    """Return bytes/s between devices of all pairs of nodes, and inside each node; shape (nodes, nodes)."""
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
