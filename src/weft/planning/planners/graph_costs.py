"""`GraphCosts`: a graph of layers on equal devices, in plain numbers, for planners that cut it into stages.

`graph_costs` fills it from weft's own models. A planner's port may fill it from published profiles instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.describe.cluster import Cluster, Link
from weft.describe.device import PRECISION_BYTES
from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES, Recompute, Sharding
from weft.errors import InputError, Violation
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.layer_times import LeastCosts, ProblemLayerTimes
from weft.planning.problem import Problem
from weft.program.arrays import Floats
from weft.program.schedules.ring import divisors

Edge = tuple[int, int]
# Long enough for the bandwidth to decide.
PROBE_BYTES = 2**28


class PassCosts(NamedTuple):
    """Costs of one micro-batch in every layer, each of shape (layers,).

    `backward_s` includes recomputed layers. `kept_bytes` stay from a layer's forward to its backward pass, of
    each micro-batch in flight. One backward pass at a time takes `taken_bytes` besides. `sent_bytes` is the
    layer's output.
    """

    forward_s: Floats
    backward_s: Floats
    kept_bytes: Floats
    taken_bytes: Floats
    sent_bytes: Floats

    @property
    def computed_s(self) -> Floats:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class GraphCosts:
    """The costs of a model's layers on equal devices.

    A device stands for all ranks of one replica of a stage.

    Attributes:
        edges: pairs of positions (producer, consumer), from layers to later ones.
        passes: by samples of a device's micro-batch, and by recomputation.
        state_bytes: bytes of each layer that a device holds all the time, shape (layers,).
        buffer_bytes: bytes for arriving gradients of each layer, where a stage has several replicas, shape
            (layers,).
        reduced_bytes: bytes of each layer's gradients that replicas reduce, shape (layers,).
        memory_bytes: the memory of each device.
        devices: the number of devices.
        global_batch: samples per step.
        link: the link between any two devices.
        rings: by number of replicas, the link that their all-reduce has in a ring; `link` for others.
        overlaps: True if messages run beside computations.
    """

    edges: tuple[Edge, ...]
    passes: Mapping[tuple[int, Recompute], PassCosts]
    state_bytes: Floats
    buffer_bytes: Floats
    reduced_bytes: Floats
    memory_bytes: float
    devices: int
    global_batch: int
    link: Link
    rings: Mapping[int, Link] = field(default_factory=dict)
    overlaps: bool = True

    def __post_init__(self) -> None:
        shapes = {len(column) for costs in self.passes.values() for column in costs}
        shapes |= {len(self.state_bytes), len(self.buffer_bytes), len(self.reduced_bytes)}
        problems = []
        if shapes != {self.layers}:
            problems.append(Violation("graph costs", f"tables of {sorted(shapes)} layers; all need as many"))
        problems += [
            Violation("graph costs", f"edge {edge} must go from a layer to a later one of {self.layers}")
            for edge in self.edges
            if not 0 <= edge[0] < edge[1] < self.layers
        ]
        if self.devices < 1 or self.global_batch < 1:
            problem = f"{self.devices} devices and a batch of {self.global_batch}; at least 1 is allowed"
            problems.append(Violation("graph costs", problem, "1"))
        if problems:
            raise InputError(problems)

    @property
    def layers(self) -> int:
        return len(self.state_bytes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of a device's micro-batches, rising."""
        return tuple(sorted({size for size, _ in self.passes}))

    def recomputes(self, size: int) -> tuple[Recompute, ...]:
        """Return the choices of recomputation at a size, the fastest first."""
        return self._recomputes.get(size, ())

    @cached_property
    def _recomputes(self) -> Mapping[int, tuple[Recompute, ...]]:
        return {size: tuple(one for one in RECOMPUTES if (size, one) in self.passes) for size in self.sizes}

    @cached_property
    def producers(self) -> tuple[frozenset[int], ...]:
        """For each layer, the layers that it reads."""
        return _ends(self.layers, [(consumer, producer) for producer, consumer in self.edges])

    @cached_property
    def consumers(self) -> tuple[frozenset[int], ...]:
        """For each layer, the layers that read it."""
        return _ends(self.layers, self.edges)

    def stage(
        self, layers: Collection[int], size: int, replicas: int, recompute: Recompute = "none"
    ) -> StageCosts:
        """Return the costs of a stage of these layers, with micro-batches of `size` samples per replica."""
        sums = self._sums_of(tuple(sorted(layers)))
        computed_s, kept_bytes, sent_bytes, taken_bytes = sums.passes[self._row[size, recompute]]
        messages_s = sums.messages * self.link.latency_s + sent_bytes / self.link.bytes_per_s
        return StageCosts(
            computed_s=computed_s,
            # Each activation has a gradient in return.
            sent_s=2.0 * messages_s,
            reduced_s=self.all_reduce_s(sums.reduced_bytes, replicas),
            resident_bytes=sums.state_bytes + sums.buffer_bytes * (replicas > 1),
            kept_bytes=kept_bytes,
            taken_bytes=taken_bytes,
        )

    def _sums_of(self, layers: tuple[int, ...]) -> _LayerSums:
        """Return the sums over a stage's layers; planners ask for the same layers at many sizes."""
        if layers not in self._known_sums:
            inside, held = set(layers), list(layers)
            received = {one for layer in layers for one in self.producers[layer]} - inside
            crossing = [*received, *(layer for layer in layers if self.consumers[layer] - inside)]
            computed, kept, taken, sent = self._tables
            columns = (
                computed[:, held].sum(axis=1),
                kept[:, held].sum(axis=1),
                sent[:, crossing].sum(axis=1),
                taken[:, held].max(axis=1),
            )
            others = (self.state_bytes, self.buffer_bytes, self.reduced_bytes)
            resident = (float(column[held].sum()) for column in others)
            self._known_sums[layers] = _LayerSums(
                np.stack(columns, axis=1).tolist(), len(crossing), *resident
            )
        return self._known_sums[layers]

    @cached_property
    def _known_sums(self) -> dict[tuple[int, ...], _LayerSums]:
        return {}

    @cached_property
    def _row(self) -> Mapping[tuple[int, Recompute], int]:
        return {key: row for row, key in enumerate(self.passes)}

    @cached_property
    def _tables(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Computed seconds, kept, taken and sent bytes, each of shape (choices of `passes`, layers)."""
        every = list(self.passes.values())
        return (
            np.stack([one.computed_s for one in every]),
            np.stack([one.kept_bytes for one in every]),
            np.stack([one.taken_bytes for one in every]),
            np.stack([one.sent_bytes for one in every]),
        )

    def sample_s(self, stage: StageCosts, size: int, replicas: int) -> float:
        """Return the seconds per sample of a stage, all its replicas together (GraphPipe, section 3)."""
        busy_s = max(stage.computed_s, stage.sent_s) if self.overlaps else stage.computed_s + stage.sent_s
        return busy_s / (size * replicas) + stage.reduced_s / self.global_batch

    def all_reduce_s(self, reduced_bytes: float, replicas: int) -> float:
        """Return the seconds of a ring of all replicas."""
        turns, link = 2 * (replicas - 1), self.rings.get(replicas, self.link)
        return turns * (link.latency_s + reduced_bytes / replicas / link.bytes_per_s)


class _LayerSums(NamedTuple):
    """Sums over a stage's layers. `passes` has, by choice of size and recomputation, computed seconds, kept
    and sent bytes, and the largest taken bytes."""

    passes: list[list[float]]
    messages: int
    state_bytes: float
    buffer_bytes: float
    reduced_bytes: float


class StageCosts(NamedTuple):
    """The costs of a stage on one of its replicas.

    `computed_s` and `sent_s` are the seconds of one micro-batch, forward and backward, in passes and in
    messages. `reduced_s` are those of a step's gradients. `resident_bytes` stay all the time, `kept_bytes`
    for every micro-batch in flight, `taken_bytes` during one backward pass.
    """

    computed_s: float
    sent_s: float
    reduced_s: float
    resident_bytes: float
    kept_bytes: float
    taken_bytes: float

    def peak_bytes(self, in_flight: float) -> float:
        """Return the bytes of a replica with so many micro-batches in flight."""
        return self.resident_bytes + in_flight * self.kept_bytes + self.taken_bytes


def _ends(layers: int, edges: Collection[Edge]) -> tuple[frozenset[int], ...]:
    found: list[set[int]] = [set() for _ in range(layers)]
    for here, there in edges:
        found[here].add(there)
    return tuple(map(frozenset, found))


def graph_costs(
    problem: Problem, sizes: Collection[int], *, tp: int = 1, sharding: Sharding = "zero-0", dp: int = 1
) -> GraphCosts:
    """Return the costs of a problem's layers; a device is `tp` ranks.

    On unlike devices, times are those of the slowest, and the memory is the smallest. Sizes without measured
    profiles are left out, and so is recomputation other than the pinned one. `dp` replicas share out states
    as `sharding` says.

    Raises:
        InputError: when no size is left.
    """
    job = problem.job
    bounds, least, times = Bounds(problem), LeastCosts(problem), ProblemLayerTimes(problem)
    pinned = problem.pins.recompute
    words: list[Recompute] = [one for one in RECOMPUTES if one != "selective" or job.graph.knows_products]
    words = [one for one in words if not isinstance(pinned, str) or one == pinned]
    passes: dict[tuple[int, Recompute], PassCosts] = {}
    refused: list[InputError] = []
    for size in sizes:
        # Stages of a single replica leave out the room for arriving gradients.
        layout = Layout(
            pp=1, dp=max(dp, 2), tp=tp, loops=1, micro_batch_size=size, schedule="1f1b", sharding=sharding
        )
        try:
            slowest_s = _slowest_s(problem, times, size, tp)
            layers = least.of(layout)
        except InputError as error:
            refused.append(error)
            continue
        sent = np.array(job.graph.amounts("sent", layout.shape(job.sequence)))
        slowness = slowest_s / np.maximum(layers.forward_s + layers.backward_s, np.finfo(float).tiny)
        for word in words:
            held = bounds.layer_bytes(layout.recomputing(word))
            passes[size, word] = PassCosts(
                forward_s=slowness * layers.forward_s,
                backward_s=slowness * (layers.backward_s + layers.again_s(word)),
                kept_bytes=held.left,
                taken_bytes=held.taken,
                sent_bytes=PRECISION_BYTES[job.precision] * sent,
            )
    if not passes:
        raise refused[0] if refused else InputError(Violation("graph costs", "no micro-batch size is given"))
    return GraphCosts(
        edges=job.graph.edges,
        passes=passes,
        state_bytes=held.states,
        buffer_bytes=held.buffers,
        reduced_bytes=bounds.exchanged_bytes(layout)[0],
        memory_bytes=float(problem.cost_model.network.places.room_bytes.min()),
        devices=job.cluster.ranks // tp,
        global_batch=job.global_batch,
        link=_slowest_link(job.cluster),
        rings=_rings(problem, tp),
        overlaps=any(not group.device.synchronous for group in job.cluster.groups),
    )


def _slowest_s(problem: Problem, times: ProblemLayerTimes, size: int, tp: int) -> Floats:
    """Return the seconds of both passes of every layer on the device that is the slowest there."""
    rows = [
        times.of_group(index, size, tp).both_s / min(group.speeds or (1.0,))
        for index, group in enumerate(problem.job.cluster.groups)
    ]
    slowest: Floats = np.max(rows, axis=0)
    return slowest


def _rings(problem: Problem, tp: int) -> dict[int, Link]:
    """Return the links that all-reduces of the first places have in rings, by weft's model of the network."""
    network, ranks, rings = problem.cost_model.network, problem.job.cluster.ranks, {}
    for replicas in divisors(ranks // tp)[1:]:
        places, turns = range(0, replicas * tp, tp), 2 * (replicas - 1)
        empty_s, full_s = (network.all_reduce_s(places, size) for size in (0, PROBE_BYTES))
        per_byte_s = (full_s - empty_s) / PROBE_BYTES
        each_s = max(per_byte_s * replicas / turns, np.finfo(float).tiny)
        rings[replicas] = Link(1.0 / each_s, empty_s / turns)
    return rings


def _slowest_link(cluster: Cluster) -> Link:
    """Return the slowest link of a device; the devices of a node share those out of it."""
    links = [group.link for group in cluster.groups if group.devices > 1]
    most = max(group.devices for group in cluster.groups)
    if sum(group.count for group in cluster.groups) > 1:
        links += [Link(link.bytes_per_s / most, link.latency_s) for link in cluster.links.values()]
    if not links:
        return Link(float("inf"), 0.0)
    return Link(min(link.bytes_per_s for link in links), max(link.latency_s for link in links))
