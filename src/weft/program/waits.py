"""The wait graph of instructions, and the ranks that hold up the others when nothing progresses.

A collective, or a message under rendezvous, is one event of all its ranks: one node of the graph. A node
waits for the instructions before it in its queues and for the sources of its edges. It also waits for the
last computation its host issued before it: a synchronous device posts nothing while it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.checks.messages import collective_codes, matched
from weft.program.kinds import is_collective, is_compute, is_send, message_kinds
from weft.program.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Positions of the ranks in a step that makes no progress.

    Attributes:
        at: by rank, for each rank with rows left: the row it has reached.
        holding: ranks with an unfinished row that waits for nothing more.
    """

    at: Mapping[int, int]
    holding: tuple[int, ...]


def standstill(program: Program, ended: Mask, absent: Collection[int] = ()) -> Standstill:
    """Find the waiting ranks and the ranks that hold them up, when no further row of a step ends.

    A collective, or a message under way, is held up by all its ranks that have not ended it. It cannot be
    seen which of them has reached it.

    Args:
        ended: True for each ended row of the program. A message that was sent but not taken counts as
            received, because a receiver may take it only when it needs it.
        absent: ranks that have not begun the step. They hold up everything they take part in.
    """
    node = events(program)
    left = ~(ended | _sent(program, ended))
    open_nodes = np.zeros(len(program), dtype=np.bool_)
    open_nodes[node[left]] = True
    source, target = waits(program, node)
    ready = open_nodes.copy()
    ready[target[open_nodes[source]]] = False

    rank = program.columns.rank
    is_absent = np.isin(rank, list(absent))
    awaited = np.zeros(len(program), dtype=np.bool_)
    awaited[node[left & is_absent]] = True
    holds = left & ready[node] & (is_absent | ~awaited[node])
    at = _first_of_ranks(program, left) | _first_of_ranks(program, holds)
    return Standstill(at=at, holding=tuple(np.unique(rank[holds]).tolist()))


def _sent(program: Program, ended: Mask) -> Mask:
    """Return True for each receive with an ended send."""
    found = np.zeros(len(program), dtype=np.bool_)
    for send, receive in message_kinds():
        sends, receives = matched(program, send, receive)
        found[receives[(receives != -1) & ended[sends]]] = True
    return found


def _first_of_ranks(program: Program, rows: Mask) -> dict[int, int]:
    """Return the first of these rows on each rank: its first computation, if it has one."""
    rank = program.columns.rank
    chosen: dict[int, int] = {}
    for wanted in (rows, rows & is_compute(program.columns.kind)):
        positions = np.flatnonzero(wanted)
        ranks, first = np.unique(rank[positions], return_index=True)
        chosen |= dict(zip(ranks.tolist(), positions[first].tolist(), strict=True))
    return chosen


def events(program: Program) -> Ints:
    """Return the node of each row: the row, a receive's send, or a collective's first member."""
    node = np.arange(len(program), dtype=np.int64)
    for send, receive in message_kinds():
        sends, receives = matched(program, send, receive)
        joined = receives != -1
        node[receives[joined]] = sends[joined]
    rows = np.flatnonzero(is_collective(program.columns.kind))
    if len(rows):
        _, first, call = np.unique(collective_codes(program, rows), return_index=True, return_inverse=True)
        node[rows] = rows[first[call]]
    return node


def waits(program: Program, node: Ints) -> tuple[Ints, Ints]:
    """Return pairs (source, target) of nodes: the target cannot end before the source."""
    queue = program.queue
    order = np.argsort(queue, kind="stable")
    follows = np.diff(queue[order]) == 0

    edges = program.edges
    same_cycle = edges.distance == 0
    source, target = edges.source[same_cycle], edges.target[same_cycle]
    # Edges inside a queue repeat its order; the edge of a message lies inside its node.
    told = (queue[source] == queue[target]) & (source < target)
    computes = is_compute(program.columns.kind)
    sends = is_send(program.columns.kind)
    told |= sends[source] & (source != target) & (node[target] == source)

    last_compute = np.maximum.accumulate(np.where(computes, np.arange(len(program)), -1))
    posted = np.flatnonzero(~computes & (last_compute >= program.rank_starts[program.columns.rank]))

    sources = np.concatenate([order[:-1][follows], source[~told], last_compute[posted]])
    targets = np.concatenate([order[1:][follows], target[~told], posted])
    pair = np.unique(node[sources] * len(program) + node[targets])
    return pair // len(program), pair % len(program)
