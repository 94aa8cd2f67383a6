"""Bounds of a placement's makespan: what no placement beats, and what m-ETF never exceeds."""

from __future__ import annotations

import numpy as np

from weft.planning.placement.graph import Devices, OperatorGraph
from weft.program.arrays import Floats


def lower_bound_ticks(graph: OperatorGraph) -> float:
    """Return the larger of the longest chain and the work of all devices together, transfers left out.

    Weights of devices that add up to 1 bound the work: each operator counts where its weighted time is least.
    Equal weights and weights by speed are tried. The latter are exact where devices differ in nothing but
    speed.
    """
    if not graph.operators:
        return 0.0
    fastest = graph.ticks.min(axis=1)
    chain = longest_chain(graph, fastest.astype(np.float64), np.zeros(len(graph.edges)))
    speeds = 1.0 / graph.ticks.sum(axis=0)
    shared = float((graph.ticks * (speeds / speeds.sum())).min(axis=1).sum())
    return max(chain, shared, float(fastest.sum() / graph.ticks.shape[1]))


def earliest_task_first_bound_ticks(graph: OperatorGraph, devices: Devices) -> float | None:
    """Return a makespan that m-ETF does not exceed; None where its assumptions do not hold.

    They are parallel transfers, equal devices and links, and groups of one operator. There is memory for
    every operator, however the others lie. D bytes are the most in all, and d the most for one operator. Of n
    devices with M bytes, n' always have room:

        n' = n - ceil(D / (M - d)) + 1

    With the computations L and the transfers C of some chain, the makespan is at most

        (sum of all computations - L) / n' + L + C

    This extends the bound of ETF (Hwang, Chow, Anger and Lee, 1989) by memory.
    """
    count = devices.count
    alike = devices.are_alike and bool((graph.ticks == graph.ticks[:, :1]).all())
    free = devices.communication == "parallel" and len(np.unique(graph.groups)) == graph.operators
    if not alike or not free:
        return None
    arriving = np.zeros(graph.operators, dtype=np.int64)
    np.add.at(arriving, graph.reads[:, 1], graph.tensor_bytes[graph.reads[:, 0]])
    copies = np.minimum(np.bincount(graph.reads[:, 0], minlength=len(graph.producer)), count - 1)
    total = int(graph.permanent_bytes.sum() + (copies * graph.tensor_bytes).sum())
    largest = (graph.permanent_bytes + arriving).max(initial=0) + graph.temporary_bytes.max(initial=0)
    room = int(devices.memory_bytes.min() - largest)
    if room <= 0 or count * room < total:
        return None
    with_room = min(count, max(1, count - -(-total // room) + 1))
    ticks = graph.ticks[:, 0].astype(np.float64)
    transfers = devices.least_transfer_ticks(graph.edge_bytes).astype(np.float64)
    chain = longest_chain(graph, ticks * (1.0 - 1.0 / with_room), transfers)
    return float(ticks.sum()) / with_room + chain


def communication_ratios(graph: OperatorGraph, devices: Devices) -> Floats:
    """Return the transfer of each of `graph.edges` over the shorter mean time of its ends, shape (edges,).

    m-SCT's guarantee assumes ratios up to 1 (Hanen and Munier, 1995).
    """
    ticks = graph.ticks.mean(axis=1)[graph.edges].min(axis=1)
    found: Floats = devices.least_transfer_ticks(graph.edge_bytes) / ticks
    return found


def longest_chain(graph: OperatorGraph, ticks: Floats, transfers: Floats) -> float:
    """Return the longest path, where operators and edges of `graph.edges` take these times."""
    begins = [0.0] * graph.operators
    own = ticks.tolist()
    # Edges are sorted by their producers, which come before their readers.
    for (producer, reader), ticks_between in zip(graph.edges.tolist(), transfers.tolist(), strict=True):
        begins[reader] = max(begins[reader], begins[producer] + own[producer] + ticks_between)
    return max((begin + one for begin, one in zip(begins, own, strict=True)), default=0.0)
