"""The bytes that replicas send each other to agree in a step, and the times of their codecs.

The count follows the collectives of `weft.predict.cost.network`. A group has m ranks on each of N nodes. Its
reduce-scatter or all-gather of b bytes goes through every node, and between the nodes:

    a node sends (m - 1) b inside, and (N - 1) / N b to other nodes.

Where nodes hold one rank, or unequally many, it is a ring of n ranks. One rank of each node then sends
(n - 1) / n b to another node. An all-reduce is both collectives. A method's `Wire` gives the bytes of each
byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.bundles import parts
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import Wire, wire_of
from weft.predict.cost.codec_times import CodecTime, codec_s
from weft.predict.cost.hooks import codecs_s
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.plan_links import sides_of
from weft.predict.cost.price import TICK_S, Priced, price_placed
from weft.predict.cost.pricing import Pricing
from weft.program.arrays import Floats, Ints
from weft.program.kinds import KINDS
from weft.program.program import NONE, Program

ShareOf = Callable[[Plan, LayerGraph, int], float]


@dataclass(frozen=True, kw_only=True)
class TrafficOf:
    """The collective by which replicas agree in one kind of instruction; a method contributes it.

    Attributes:
        ways: how often a plan's collective moves its bytes: 1 for a reduce-scatter or an all-gather, 2 for an
            all-reduce.
        wire, share: the traffic of each byte, and the bytes sent for each byte of a stage's gradient, as the
            cost of the kind has them.
        plans: returns rows apart where they have other wires: for each part, the plan with its wire.
    """

    kind: str
    ways: Callable[[Plan], int]
    wire: Callable[[Plan], Wire] = wire_of
    share: ShareOf = lambda plan, graph, stage: 1.0
    plans: Callable[[Plan, Program, Ints], Iterable[tuple[Plan, Ints]]] = lambda plan, program, rows: (
        (plan, rows),
    )


class Traffic(NamedTuple):
    """The agreement of replicas in a step.

    Attributes:
        between_bytes, inside_bytes: sent by the node that sends most, to other nodes and inside.
    """

    between_bytes: float
    inside_bytes: float


def traffic(pricing: Pricing) -> Traffic:
    """Return the agreement of replicas in a mean step of a whole program, neither folded nor a part."""
    program, plan, places = pricing.program, pricing.plan, pricing.model.network.places
    columns, cycle = program.columns, program.steps_per_cycle
    sent = np.zeros((2, int(places.node.max()) + 1))
    for one, wire, rows in _synchronising(plan, program):
        ways = one.ways(plan)
        # Codecs with instructions of their own meet nobody.
        rows = rows[columns.group[rows] != NONE]
        shares = np.array([one.share(plan, pricing.model.graph, stage) for stage in range(len(plan.stages))])
        weights = columns.bytes[rows] * shares[columns.stage[rows]]
        moved = np.bincount(columns.group[rows], weights=weights, minlength=len(program.groups))
        for group in np.flatnonzero(moved).tolist():
            ranks = program.groups[group]
            # Every rank of a group has its own row of a collective.
            each = ways * moved[group] / len(ranks)
            if set(plan.servers) <= set(ranks) and plan.servers:
                # Between a replica and a server goes an equal part of the bytes, in either direction.
                senders, receivers = sides_of(ranks, plan.servers)
                part = each / len(plan.servers)
                sent += part * _flows(places.node[senders], places.node[receivers], wire, sent.shape[1])
            else:
                sent += each * _sent(places.node[list(ranks)], wire, sent.shape[1])
    between, inside = sent.max(axis=1) / cycle
    return Traffic(float(between), float(inside))


def busiest_codecs_s(pricing: Pricing, codec: CodecTime = codec_s) -> float:
    """Return the seconds of a mean step in which the busiest rank of a whole program encodes and decodes."""
    program, busy_s = pricing.program, np.zeros(pricing.program.ranks)
    for _, wire, rows in _synchronising(pricing.plan, program):
        np.add.at(busy_s, program.columns.rank[rows], codecs_s(pricing, rows, wire, codec))
    return float(busy_s.max(initial=0.0)) / program.steps_per_cycle


def _sent(nodes: Ints, wire: Wire, count: int) -> Floats:
    """Return the bytes that each node sends one way for each byte, shape (between and inside, nodes).

    `nodes` has the node of each rank of a group, and `count` is the number of all nodes.
    """
    held = np.bincount(nodes, minlength=count)
    there, others = held > 0, np.maximum(held - 1, 0)
    ranks, spanned, most = len(nodes), int(there.sum()), int(held.max())
    even = most > 1 and spanned * most == ranks
    between = (spanned - 1) / spanned if even else (ranks - 1) / ranks
    return np.stack([wire.between * between * there, wire.inside * (1.0 if even else between) * others])


def _flows(senders: Ints, receivers: Ints, wire: Wire, count: int) -> Floats:
    """Return the bytes that nodes send as `_sent` does, if every sender sends a byte to every receiver."""
    here, there = np.repeat(senders, len(receivers)), np.tile(receivers, len(senders))
    crosses = here != there
    each = [np.bincount(here[kept], minlength=count) for kept in (crosses, ~crosses)]
    return np.stack([wire.between * each[0], wire.inside * each[1]])


def price_with_codecs(codec: CodecTime) -> Callable[[PlacedPlan, Program], Priced]:
    """Return a function that prices as `price_placed` does, with other times of codecs."""

    def price(placed: PlacedPlan, program: Program) -> Priced:
        priced, pricing = price_placed(placed, program), Pricing(program=program, placed=placed)
        costs, saved_s = priced.costs, np.zeros(len(program))
        for _, wire, rows in _synchronising(placed.plan, program):
            saved_s[rows] = codecs_s(pricing, rows, wire) - codecs_s(pricing, rows, wire, codec)
        occupancy = np.maximum(costs.occupancy - np.rint(saved_s / TICK_S).astype(np.int64), 0)
        assert costs.demand is not None, "prices have the demand of every row"
        # The same bytes keep the link of a shorter collective busy for a larger part of it.
        busier = np.divide(costs.occupancy, occupancy, out=np.ones(len(program)), where=occupancy > 0)
        demand = np.minimum(costs.demand * busier, 1.0)
        return replace(priced, costs=replace(costs, occupancy=occupancy, demand=demand))

    return price


def codec_shares(pricing: Pricing, occupancy_s: Floats) -> Floats:
    """Return the share of each row's seconds in which its rank encodes or decodes, shape (rows,)."""
    found = np.zeros(len(pricing.program))
    for _, wire, rows in _synchronising(pricing.plan, pricing.program):
        found[rows] = codecs_s(pricing, rows, wire)
    shares = np.divide(found, occupancy_s, out=np.zeros_like(found), where=occupancy_s > 0.0)
    return np.minimum(shares, 1.0)


def _synchronising(plan: Plan, program: Program) -> list[tuple[TrafficOf, Wire, Ints]]:
    """Return the rows of each kind of instruction by which replicas agree, where there are some."""
    kinds = ((one, np.flatnonzero(program.columns.kind == KINDS.code(one.kind))) for one in parts(TrafficOf))
    return [
        (one, one.wire(other), mine)
        for one, rows in kinds
        if len(rows)
        for other, mine in one.plans(plan, program, rows)
        if len(mine)
    ]
