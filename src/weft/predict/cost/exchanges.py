"""Seconds that the ranks of one replica spend on exchanges inside their computations.

Tensor ranks all-reduce in every pass of a layer. Context ranks gather keys and values in a forward pass and
reduce and scatter their gradients in a backward pass (Llama 3, arXiv 2407.21783, section 3.3.2); where the
loss takes its share of the tokens they exchange two numbers for it; and before replicas reduce a stage's
gradient they add up theirs, of all its parameters. Where a replica has both, each rank does both, with its
share of the layers and of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.describe.layer_pieces import cut_of
from weft.describe.plan import Plan
from weft.predict.cost.memory import gradient_element_bytes, own_parameters
from weft.predict.cost.network import CollectiveTime, Network
from weft.program.arrays import Ints

# Context ranks exchange the sum of the loss over the own tokens and the count of these, in fp64.
LOSS_BYTES = 16

Ranks = tuple[int, ...]


class Exchanges(NamedTuple):
    """Of one micro-batch in a forward pass, a backward pass and a forward pass that is run again; and of one
    sum of a stage's gradient."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0
    gradient_s: float = 0.0


def gathered_bytes(graph: LayerGraph, layer: int, shape: Shape, element_bytes: int) -> int:
    """Bytes of the keys and values of a layer that all context ranks together gather on each of them."""
    return round(shape.all_parts(graph.amounts("gathered", shape)[layer]) * element_bytes)


class StageExchanges(NamedTuple):
    """What the replicas of a stage exchange, by kind of place, of which all replicas take the same time.

    Attributes:
        exchanges: of each kind.
        first: the first replica of each kind.
        of_replica: the kind of each replica, shape (replicas,).
    """

    exchanges: tuple[Exchanges, ...]
    first: tuple[int, ...]
    of_replica: Ints


def stage_exchanges(
    plan: Plan,
    graph: LayerGraph,
    network: Network,
    ranks_of_stage: Sequence[Ints],
    timed: Callable[[int, int], bool] = lambda stage, first_rank: False,
) -> Mapping[int, StageExchanges]:
    """By stage, for those whose replicas have several ranks; these, of shape (replicas, ranks of one), are
    given by stage.

    `timed` says whether times of a stage, on the replica that begins with a rank, contain what its tensor
    ranks exchange.
    """
    found: dict[int, StageExchanges] = {}
    for stage, ranks in enumerate(ranks_of_stage):
        grid = plan.grid(stage)
        sizes = zip((_tensor, _context), grid, strict=True)
        axes = [one(plan, graph, network, stage) for one, size in sizes if size > 1]
        if not axes:
            continue
        without_tensor = axes[1:] if grid.tensor > 1 else axes
        first, of_replica = _places(network, ranks)
        parts = (
            [
                seconds_of(tuple(ranks[one].tolist()))
                for seconds_of in (without_tensor if timed(stage, int(ranks[one, 0])) else axes)
            ]
            for one in first
        )
        exchanges = tuple(Exchanges(*map(sum, zip(*each, strict=True))) for each in parts)
        found[stage] = StageExchanges(exchanges, first, of_replica)
    return found


def _places(network: Network, ranks: Ints) -> tuple[tuple[int, ...], Ints]:
    """(the first replica of each kind of place, the kind of each replica), kinds in order of the first ones.

    Inside a node the others like it are as near, so that only its group matters; `ranks` are those of each
    replica.
    """
    places = network.places
    node = places.node[ranks]
    on_one = (node == node[:, :1]).all(axis=1)
    # No group is NONE or less, so that those on several nodes are each a kind of their own.
    kind = np.where(on_one, places.group[ranks[:, 0]], -1 - np.arange(len(ranks)))
    _, first, of_replica = np.unique(kind, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return tuple(first[order].tolist()), number[of_replica]


def _tensor(plan: Plan, graph: LayerGraph, network: Network, stage: int) -> Callable[[Ranks], Exchanges]:
    shape = plan.shape(stage)
    reduced, exchanges = graph.amounts("tensor_reduced", shape), graph.tensor_exchanges
    sizes: Counter[int] = Counter()
    for layer in plan.stages[stage].layers:
        if size := round(reduced[layer] * plan.element_bytes / exchanges[layer]):
            sizes[size] += exchanges[layer]

    def seconds_of(ranks: Ranks) -> Exchanges:
        groups = plan.grid(stage).tensor_groups(ranks)
        seconds = sum(
            count * _at_once(network, network.all_reduce, groups, size) for size, count in sizes.items()
        )
        return Exchanges(seconds, seconds, seconds)

    return seconds_of


def tensor_exchanges_s(
    plan: Plan, graph: LayerGraph, network: Network, stage: int, ranks: Ranks
) -> tuple[float, float]:
    """Seconds of one pass that the tensor ranks of a replica spend on exchanges: on all of them, and on those
    that are not between the pieces of layers, which a loss makes."""
    shape, left = plan.shape(stage), 0.0
    for layer in plan.stages[stage].layers:
        between = sum(one.elements(shape) for one in cut_of(graph.layers[layer]).borders)
        left += graph.amounts("tensor_reduced", shape)[layer] - between / 2.0
    groups, left_bytes = plan.grid(stage).tensor_groups(ranks), round(left * plan.element_bytes)
    left_s = _at_once(network, network.all_reduce, groups, left_bytes) if left_bytes > 0 else 0.0
    return _tensor(plan, graph, network, stage)(ranks).forward_s, left_s


def _context(plan: Plan, graph: LayerGraph, network: Network, stage: int) -> Callable[[Ranks], Exchanges]:
    shape, grid, layers = plan.shape(stage), plan.grid(stage), plan.stages[stage].layers
    gathered = (gathered_bytes(graph, layer, shape, plan.element_bytes) for layer in layers)
    sizes = Counter(size for size in gathered if size)
    loss_bytes = LOSS_BYTES * grid.context if len(graph.layers) - 1 in layers else 0
    gradient_bytes = gradient_element_bytes(plan) * own_parameters(graph, layers, shape)

    def seconds_of(ranks: Ranks) -> Exchanges:
        groups = grid.context_groups(ranks)
        gathers_s, scatters_s = (
            sum(count * _at_once(network, exchange, groups, size) for size, count in sizes.items())
            for exchange in (network.all_gather, network.reduce_scatter)
        )
        loss_s = _at_once(network, network.all_gather, groups, loss_bytes) if loss_bytes else 0.0
        gradient_s = _at_once(network, network.all_reduce, groups, gradient_bytes) if gradient_bytes else 0.0
        return Exchanges(gathers_s + loss_s, scatters_s, gathers_s, gradient_s)

    return seconds_of


def _at_once(
    network: Network,
    exchange: Callable[[Ranks, int], CollectiveTime],
    groups: Sequence[Ranks],
    moved_bytes: int,
) -> float:
    """Seconds until all groups are done, which exchange as many bytes each and share the links of nodes."""
    leaving = Counter(
        node
        for nodes in ({network.cluster.node_of(rank) for rank in group} for group in groups)
        for node in nodes
        if len(nodes) > 1
    )
    sharing = max(leaving.values(), default=1)
    taken = [exchange(group, moved_bytes) for group in groups]
    return max(max(one.seconds, sharing * one.link_s) for one in taken)
