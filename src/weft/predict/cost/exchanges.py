"""Seconds that the ranks of one replica spend on exchanges inside their computations.

Tensor ranks all-reduce in every pass of a layer. Those of a stage gather the tokens of values for stages with
fewer tensor ranks. Context ranks all-gather keys and values in a forward pass.
In a backward pass they reduce-scatter the gradients of both (Llama 3, arXiv 2407.21783, section 3.3.2). For a
loss over shares of the tokens they exchange two numbers. Before replicas reduce a stage's gradient, context
ranks sum theirs, of all its parameters. In a replica with both axes, each rank does both, with its share of
the layers and of the tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.describe.layer_pieces import cut_of
from weft.describe.plan import EXPERT_EXCHANGES, Plan, Recompute, expert_ranks_per_node
from weft.predict.cost.memory import alike_parameters, gradient_element_bytes, reduced_parameters
from weft.predict.cost.network import CollectiveTime, Network
from weft.predict.cost.network import Ranks as NetworkRanks
from weft.program.arrays import Ints

# Each context rank sends the sum of the loss over its tokens and their count, in fp64.
LOSS_BYTES = 16
# Each expert rank tells all others how many rows it has for each expert.
COUNT_BYTES = 8

Ranks = tuple[int, ...]


class Exchanges(NamedTuple):
    """Seconds of a micro-batch's exchanges (`again_s`: its repeated forward), and of one gradient sum."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0
    gradient_s: float = 0.0

    def of_both(self, recompute: Recompute) -> float:
        """Return the seconds of a micro-batch's forward and backward pass."""
        return self.forward_s + self.backward_s + (self.again_s if recompute != "none" else 0.0)

    @classmethod
    def total(cls, each: Iterable[Exchanges]) -> Exchanges:
        return cls(*map(sum, zip(cls(), *each, strict=True)))


# From the ranks of a replica to the exchanges of each layer of its stage. The sum of a loss is with the last
# layer. The sum of a gradient, with which backward passes end, is with the first.
ByLayer = Callable[[Ranks], list[Exchanges]]


def gathered_bytes(graph: LayerGraph, layer: int, shape: Shape, element_bytes: int) -> int:
    """Return the bytes of a layer's keys and values that each context rank gathers from all of them."""
    return round(shape.all_parts(graph.amounts("gathered", shape)[layer]) * element_bytes)


class StageExchanges(NamedTuple):
    """The exchanges of a stage's replicas by kind of place; all replicas of a kind take the same time.

    Attributes:
        exchanges: of each kind.
        first: the first replica of each kind.
        of_replica: the kind of each replica, shape (replicas,).
        half_width: of the interval of the least certain exchange, from its number of ranks.
    """

    exchanges: tuple[Exchanges, ...]
    first: tuple[int, ...]
    of_replica: Ints
    half_width: float


def stage_exchanges(
    plan: Plan,
    graph: LayerGraph,
    network: Network,
    ranks_of_stage: Sequence[Ints],
    timed: Callable[[int, int], bool] = lambda stage, first_rank: False,
) -> Mapping[int, StageExchanges]:
    """Return the exchanges by stage, for stages with several ranks per replica.

    `ranks_of_stage` has shape (replicas, ranks of one) for each stage, -1 behind the ranks of narrower ones.
    `timed` gets a stage and the first rank of a replica. It returns True if the times of the stage there
    contain the tensor ranks' exchanges.
    """
    found: dict[int, StageExchanges] = {}
    alike, uniform = plan.has_like_replicas, len(plan.distinct_degrees) == 1
    for stage, rows in enumerate(ranks_of_stage):
        if rows.shape[1] == 1:
            continue
        exchanges: list[Exchanges] = []
        firsts: list[int] = []
        of_replica, half_widths = np.zeros(len(rows), dtype=np.int64), [0.0]
        for gathered, copies in _like_replicas(plan, graph, stage, alike=alike, uniform=uniform):
            grid = plan.grid(stage, copies[0])
            ranks = rows[copies, : grid.ranks]
            sizes = zip((tensor_exchanges, context_exchanges, expert_exchanges), grid, strict=True)
            axes = [one(plan, graph, network, stage, copies[0]) for one, size in sizes if size > 1]
            if any(gathered):
                axes.append(_gathered(plan, network, stage, copies[0], *gathered))
            without_tensor = axes[1:] if grid.tensor > 1 else axes
            first, kind = _places(network, ranks)
            of_replica[copies] = len(exchanges) + kind
            for one in first:
                inside = without_tensor if timed(stage, int(ranks[one, 0])) else axes
                each = (seconds_of(tuple(ranks[one].tolist())) for seconds_of in inside)
                exchanges.append(Exchanges.total(chain.from_iterable(each)))
                firsts.append(copies[one])
            half_widths += (
                network.half_width(group)
                for one in first
                for axis, along in enumerate(grid.groups(ranks[one].tolist()))
                if grid[axis] > 1 and not (axis == 0 and timed(stage, int(ranks[one, 0])))
                for group in along
            )
        found[stage] = StageExchanges(tuple(exchanges), tuple(firsts), of_replica, max(half_widths))
    return found


# Bytes of values that tensor ranks gather for stages with fewer: of each forward and of each backward pass.
_GatheredBytes = tuple[tuple[int, ...], tuple[int, ...]]


def _like_replicas(
    plan: Plan, graph: LayerGraph, stage: int, *, alike: bool, uniform: bool
) -> list[tuple[_GatheredBytes, list[int]]]:
    """Return the replicas of a stage that exchange alike, together, with the bytes of values they gather.

    `alike`: replicas of each stage have equally many tensor ranks; `uniform`: all stages have, too.
    """
    if alike:
        gathered: _GatheredBytes = ((), ()) if uniform else _gathered_bytes(plan, graph, stage, 0)
        return [(gathered, list(range(len(plan.stages[stage].replicas))))]
    together = defaultdict[tuple[int, _GatheredBytes], list[int]](list)
    for copy, degree in enumerate(plan.replica_degrees[stage]):
        together[degree, _gathered_bytes(plan, graph, stage, copy)].append(copy)
    return [(gathered, copies) for (_, gathered), copies in together.items()]


def _places(network: Network, ranks: Ints) -> tuple[tuple[int, ...], Ints]:
    """Return (first replica of each kind of place, kind of each replica); kinds rise with their first ones.

    All nodes of a group are alike, so inside one node only the group matters. `ranks` has a row per replica.
    """
    places = network.places
    node = places.node[ranks]
    on_one = (node == node[:, :1]).all(axis=1)
    # No group is NONE or less, so each replica on several nodes is a kind of its own.
    kind = np.where(on_one, places.group[ranks[:, 0]], -1 - np.arange(len(ranks)))
    _, first, of_replica = np.unique(kind, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return tuple(first[order].tolist()), number[of_replica]


def tensor_exchanges(plan: Plan, graph: LayerGraph, network: Network, stage: int, copy: int = 0) -> ByLayer:
    """Price the all-reduces of tensor ranks, or the gathers and scatters in their place."""
    shape, counts = plan.shape(stage, copy), graph.tensor_exchanges
    reduced = graph.amounts("tensor_reduced", shape)
    each = [
        (counts[layer], round(reduced[layer] * plan.element_bytes / counts[layer]))
        for layer in plan.stages[stage].layers
    ]

    def seconds_of(ranks: Ranks) -> list[Exchanges]:
        groups = plan.grid(stage, copy).tensor_groups(ranks)
        once_s = _once(network, network.all_reduce, groups, (size for _, size in each))
        seconds = (count * once_s[size] for count, size in each)
        return [Exchanges(one, one, one) for one in seconds]

    return seconds_of


def _gathered_bytes(plan: Plan, graph: LayerGraph, stage: int, copy: int) -> _GatheredBytes:
    """Return the bytes of values that a replica's tensor ranks gather.

    Ranks that divide the tokens of the stream by more than the receiving replica gather them.
    """
    found: tuple[list[int], list[int]] = ([], [])
    shape, held = plan.shape(stage, copy), plan.shape(stage, copy).sequence_parallel
    if held > 1:
        for edge, layers in graph.crossing(one.layers for one in plan.stages).items():
            for direction, (sender, receiver) in enumerate((edge, edge[::-1])):
                if sender == stage and held > plan.shape(receiver, copy).sequence_parallel:
                    own = sum(graph.amounts("sent", shape)[layer] for layer in layers)
                    found[direction].append(round(own * held * plan.element_bytes))
    return tuple(found[0]), tuple(found[1])


def _gathered(
    plan: Plan, network: Network, stage: int, copy: int, forward: Sequence[int], backward: Sequence[int]
) -> ByLayer:
    def seconds_of(ranks: Ranks) -> list[Exchanges]:
        groups = plan.grid(stage, copy).tensor_groups(ranks)
        there_s, back_s = (
            sum(_at_once(network, network.all_gather, groups, size) for size in sizes)
            for sizes in (forward, backward)
        )
        return [Exchanges(there_s, back_s)]

    return seconds_of


def tensor_exchanges_s(
    plan: Plan, graph: LayerGraph, network: Network, stage: int, ranks: Ranks
) -> tuple[float, float]:
    """Return seconds per pass of a replica's tensor exchanges: all, and those outside layer borders.

    The latter come from a loss.
    """
    shape, left = plan.shape(stage), 0.0
    for layer in plan.stages[stage].layers:
        between = sum(one.elements(shape) for one in cut_of(graph.layers[layer]).borders)
        left += graph.amounts("tensor_reduced", shape)[layer] - between / 2.0
    groups, left_bytes = plan.grid(stage).tensor_groups(ranks), round(left * plan.element_bytes)
    left_s = _at_once(network, network.all_reduce, groups, left_bytes) if left_bytes > 0 else 0.0
    all_s = Exchanges.total(tensor_exchanges(plan, graph, network, stage)(ranks)).forward_s
    return all_s, left_s


def context_exchanges(plan: Plan, graph: LayerGraph, network: Network, stage: int, copy: int = 0) -> ByLayer:
    """Price gathers of keys and values, scatters of their gradients, and sums of loss and gradient."""
    shape, grid, layers = plan.shape(stage, copy), plan.grid(stage, copy), plan.stages[stage].layers
    each = [gathered_bytes(graph, layer, shape, plan.element_bytes) for layer in layers]
    sums = _sums(plan, graph, network, stage, reduced_parameters(plan, graph, stage))

    def seconds_of(ranks: Ranks) -> list[Exchanges]:
        groups = grid.context_groups(ranks)
        gather_s, scatter_s = (
            _once(network, exchange, groups, each)
            for exchange in (network.all_gather, network.reduce_scatter)
        )
        found = [Exchanges(gather_s[size], scatter_s[size], gather_s[size]) for size in each]
        return _with_sums(found, *sums(groups))

    return seconds_of


def expert_exchanges(
    plan: Plan, graph: LayerGraph, network: Network, stage: int, copy: int = 0, *, rows: bool = True
) -> ByLayer:
    """Price rows that go to their experts and back, as if all experts had as many.

    Forward passes of a mixture gather the counts of rows first. Without `rows`, price the sums of the loss
    and of the gradient alone.
    """
    shape, grid, layers = plan.shape(stage, copy), plan.grid(stage, copy), plan.stages[stage].layers
    dispatched = graph.amounts("dispatched", shape)
    each = [round(dispatched[layer] * plan.element_bytes) if rows else 0 for layer in layers]
    counts_bytes = COUNT_BYTES * graph.experts * grid.expert
    sums = _sums(plan, graph, network, stage, alike_parameters(graph, layers, shape))

    def seconds_of(ranks: Ranks) -> list[Exchanges]:
        groups = grid.expert_groups(ranks)
        there_s = _once(network, row_exchange(network, plan), groups, each)
        counts_s = _at_once(network, network.all_gather, groups, counts_bytes) if any(each) else 0.0
        found = []
        for size in each:
            again_s = 2 * there_s[size] + (counts_s if size else 0.0)
            found.append(Exchanges(again_s, 2 * there_s[size], again_s))
        return _with_sums(found, *sums(groups))

    return seconds_of


def row_exchange(network: Network, plan: Plan) -> Callable[[NetworkRanks, int], CollectiveTime]:
    """Return the all-to-all of a plan's expert ranks, at once or in two levels."""
    at_once = expert_ranks_per_node(plan.method(EXPERT_EXCHANGES)) == 1
    return network.all_to_all if at_once else network.all_to_all_by_node


def _with_sums(each: list[Exchanges], loss_s: float, gradient_s: float) -> list[Exchanges]:
    """Return the exchanges of layers, with those that end forward and backward passes."""
    first, last = Exchanges(gradient_s=gradient_s), Exchanges(forward_s=loss_s)
    each[0] = Exchanges.total((each[0], first))
    each[-1] = Exchanges.total((each[-1], last))
    return each


def _sums(
    plan: Plan, graph: LayerGraph, network: Network, stage: int, parameters: int
) -> Callable[[Sequence[Ranks]], tuple[float, float]]:
    """Return the seconds of (a loss, a sum of gradients) over groups of ranks with tokens of their own.

    `parameters`: those of the stage that all ranks of a group have.
    """
    ends = len(graph.layers) - 1 in plan.stages[stage].layers
    gradient_bytes = gradient_element_bytes(plan) * parameters

    def seconds_of(groups: Sequence[Ranks]) -> tuple[float, float]:
        loss_bytes = LOSS_BYTES * len(groups[0]) if ends else 0
        pairs = ((network.all_gather, loss_bytes), (network.all_reduce, gradient_bytes))
        loss_s, gradient_s = (_at_once(network, one, groups, size) if size else 0.0 for one, size in pairs)
        return loss_s, gradient_s

    return seconds_of


def _once(
    network: Network,
    exchange: Callable[[Ranks, int], CollectiveTime],
    groups: Sequence[Ranks],
    sizes: Iterable[int],
) -> Mapping[int, float]:
    """Return seconds by size, of which there are few."""
    return {size: _at_once(network, exchange, groups, size) if size else 0.0 for size in set(sizes)}


def _at_once(
    network: Network,
    exchange: Callable[[Ranks, int], CollectiveTime],
    groups: Sequence[Ranks],
    moved_bytes: int,
) -> float:
    """Return seconds until all groups have exchanged `moved_bytes` each, sharing the links of nodes."""
    leaving = Counter(
        node
        for nodes in ({network.cluster.node_of(rank) for rank in group} for group in groups)
        for node in nodes
        if len(nodes) > 1
    )
    sharing = max(leaving.values(), default=1)
    taken = [exchange(group, moved_bytes) for group in groups]
    return max(max(one.seconds, sharing * one.link_s) for one in taken)
