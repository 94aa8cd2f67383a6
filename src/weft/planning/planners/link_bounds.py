"""Lower bounds of the step by messages and by collectives of replicas, without a program.

Exchanges inside replicas count as computations, as in `weft.planning.planners.bounds`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.describe.layout import Layout
from weft.describe.synchronisation import DENSE
from weft.moves.layout import pipeline_of
from weft.moves.sharers import replicas_of, sharers_of
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.order_paths import OrderPaths, order_paths
from weft.planning.problem import Problem
from weft.predict.cost.network import CollectiveTime
from weft.program.arrays import Floats, Ints
from weft.program.program import NONE
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline

# Following a longer order takes as long as simulating a part of it.
LONGEST_ORDER = 20_000

# Seconds of a gather, a reduction and one across islands: from start to end, and busy on a link of a node.
_Agreement = tuple[tuple[float, float, float], tuple[float, float, float]]
_NOTHING = 0.0, 0.0


class _Holders(NamedTuple):
    """The copies of a stage: their devices in a pipeline, replicas, ranks of each, sharing, and bytes."""

    devices: tuple[int, ...]
    dp: int
    width: int
    sharers: int
    shards: bool
    gradient_bytes: int
    weight_bytes: int


class LinkBounds:
    """Lower bounds for those layouts of one problem whose devices, nodes and replicas are alike."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._job, self._bounds = problem.job, bounds
        self._network = problem.cost_model.network
        self._on_node = problem.job.cluster.groups[0].devices
        self._paths: dict[tuple[str, str, Pipeline], OrderPaths] = {}
        self._messages: dict[tuple[int, int, bool], tuple[float, float]] = {}
        self._agreements: dict[_Holders, _Agreement] = {}

    def step_s(self, layout: Layout) -> float:
        """Return a lower bound of the step in seconds; 0 for layouts of unlike parts."""
        if not self._knows(layout):
            return 0.0
        placement = self._bounds.placement(layout)
        message_s = self._messages_s(layout, placement)
        agreement_s = self._agreements_s(layout, placement)
        path_s = self._path_s(layout, message_s, agreement_s[0])
        return max(path_s, self._busy_s(layout, placement, message_s[0], agreement_s))

    def _path_s(self, layout: Layout, message_s: Floats, agreement_s: Floats) -> float:
        """Return the seconds of a step on the first device, from its first gather to its last reduction.

        It waits for all other devices, and for messages as if those of other stages used other links. The
        next step begins as this one, so no step is shorter.
        """
        paths = self._paths_of(layout)
        durations: list[float] = np.concatenate(self._bounds.pass_seconds(layout)).tolist()
        # No message follows the last stage; messages back take as long.
        busy, latency = np.pad(message_s, ((0, 0), (0, 0), (0, 1))).reshape(2, -1).tolist()
        longest_s = paths.longest_s(durations, 2 * busy, 2 * latency)
        if paths.last == NONE:
            return longest_s
        agreed_s: list[float] = agreement_s[:, 0].tolist()
        reduce_s, layers = agreed_s[1], int(self._bounds.layers_of_stages(layout)[0])
        # All layers but one may be reduced during the last backward pass.
        hidden_s = (1.0 - 1.0 / layers) * min(durations[paths.last], reduce_s)
        return longest_s + sum(agreed_s) - hidden_s

    def _busy_s(self, layout: Layout, placement: Ints, message_s: Floats, agreement_s: Floats) -> float:
        """Return the most seconds in which a device runs collectives, or its node sends.

        A device runs one collective at a time. Transfers of one step share no link with those of the next.
        Gathers begin a step, and may meet the last gradients that a device has sent. So these two do not
        count together. Last are those after the last forward pass of the first stage.
        """

        def on_devices(homes: Ints, seconds: Floats) -> Floats:
            each = np.broadcast_to(seconds, homes.shape).ravel()
            return np.bincount(homes.ravel(), weights=each, minlength=layout.pp).astype(np.float64)

        alone_s, (gather_s, reduce_s, across_s) = (
            [on_devices(placement, one) for one in seconds] for seconds in agreement_s
        )
        node, here, there = self._nodes(layout), placement[:, :-1], placement[:, 1:]
        count = pipeline_of(self._job, layout).micro_batches // len(placement)
        sends_s = message_s * (node[here] != node[there])
        sent_s = reduce_s + across_s + on_devices(here, count * sends_s)
        returned = np.array(self._paths_of(layout).returned)[:, np.newaxis]
        # Without the last gradients, and on one path without the gathers.
        first_s = gather_s + sent_s + on_devices(there, returned * sends_s)
        later_s = np.bincount(node, weights=sent_s + on_devices(there, count * sends_s))
        found = (np.sum(alone_s, axis=0), first_s, later_s if len(placement) == 1 else first_s)
        return max(float(one.max()) for one in found)

    def _knows(self, layout: Layout) -> bool:
        """Return True if all parts are alike, no method changes the step, and its order is not too long."""
        span, on_node, island = layout.dp * layout.width, self._on_node, layout.island or 1
        return (
            len(self._network.places.paces) == 1
            and self._job.graph.is_chain
            and layout.rank_order is None
            and layout.micro_batches_per_replica is None
            and not layout.splits
            and layout.sync == DENSE
            and not layout.methods_beside(self._job.methods)
            and on_node % layout.width == layout.dp % island == 0
            and 0 in (span % on_node, on_node % span)
            and 0 in (island * layout.width % on_node, on_node % (island * layout.width))
            and 2 * layout.stages * pipeline_of(self._job, layout).micro_batches <= LONGEST_ORDER
        )

    def _paths_of(self, layout: Layout) -> OrderPaths:
        pipeline = pipeline_of(self._job, layout)
        key = (layout.schedule, str(layout.options), pipeline)
        if key not in self._paths:
            self._paths[key] = order_paths(get_schedule(layout.schedule), pipeline, layout.options)
        return self._paths[key]

    def _nodes(self, layout: Layout) -> Ints:
        """Return the first node of each device of a pipeline, for all replicas; shape (devices,)."""
        return np.arange(layout.pp) * layout.dp * layout.width // self._on_node

    def _messages_s(self, layout: Layout, placement: Ints) -> Floats:
        """Return (busy, latency) of a message between each stage and the next one by path, in seconds.

        The shape is (2, paths, stages - 1).
        """
        sizes, span, nodes = self._bounds.message_bytes(layout), layout.dp * layout.width, self._nodes(layout)
        each = [
            self._message_s(size, span, nodes[here] != nodes[there]) if here != there else _NOTHING
            for homes in placement.tolist()
            for here, there, size in zip(homes[:-1], homes[1:], sizes, strict=True)
        ]
        return np.array(each).reshape(len(placement), len(sizes), 2).transpose(2, 0, 1)

    def _message_s(self, size: int, span: int, crosses: bool) -> tuple[float, float]:
        key = size, span, crosses
        if key not in self._messages:
            # All devices of a node send at once.
            peer, flows = (self._on_node, min(span, self._on_node)) if crosses else (span, 1)
            self._messages[key] = self._network.message_s(0, peer, size, flows)
        return self._messages[key]

    def _agreements_s(self, layout: Layout, placement: Ints) -> Floats:
        """Return the agreement of every stage, shape (2, 3, stages)."""
        if replicas_of(layout) == 1:
            return np.zeros((2, 3, layout.stages))
        alike = layout.dp, layout.width, sharers_of(layout), layout.sharding != "zero-0"
        # On one path, each device's replicas lie on their nodes like those of the first.
        paths = [tuple(sorted(one)) if len(one) > 1 else (0,) for one in placement.T.tolist()]
        sizes = zip(*self._bounds.exchanged_by_stage(layout), strict=True)
        each = [self._agreement(_Holders(one, *alike, *size)) for one, size in zip(paths, sizes, strict=True)]
        return np.array(each).transpose(1, 2, 0)

    def _agreement(self, copies: _Holders) -> _Agreement:
        if copies not in self._agreements:
            self._agreements[copies] = self._agreement_of(copies)
        return self._agreements[copies]

    def _agreement_of(self, copies: _Holders) -> _Agreement:
        devices, dp, width, sharers, shards, gradient_bytes, weight_bytes = copies
        ranks = [(device * dp + copy) * width for device in devices for copy in range(dp)]
        network, island = self._network, ranks[:sharers]
        gather = across = reduce = _NOTHING
        if gradient_bytes and not shards:
            reduce = _at_once(network.all_reduce(island, gradient_bytes), width)
        elif gradient_bytes:
            gather = _at_once(network.all_gather(island, weight_bytes), width)
            reduce = _at_once(network.reduce_scatter(island, gradient_bytes), width)
        if gradient_bytes and sharers < len(ranks):
            # The ranks of a node have different shards, until these repeat.
            flows = min(sharers * width, dp * width, self._on_node)
            shard_bytes = -(-gradient_bytes // sharers)
            across = _at_once(network.all_reduce(ranks[::sharers], shard_bytes), flows)
        alone_s, on_link_s = zip(gather, reduce, across, strict=True)
        return alone_s, on_link_s


def _at_once(alone: CollectiveTime, flows: int) -> tuple[float, float]:
    """Return (from start to end, busy on a link) of one of as many equal collectives on each link."""
    link_s = flows * alone.link_s
    return max(alone.seconds, link_s), link_s
