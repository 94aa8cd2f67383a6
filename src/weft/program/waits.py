"""Which instructions wait for which, and who holds up the others when nothing goes on.

Under rendezvous a message is one event of both ranks, and so is a collective: each is one node of the graph.
A node waits for the instructions before it in its queues, for the sources of its edges and, because a
synchronous device posts nothing while it computes, for the computation its host issued before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.checks.messages import collective_codes, matched
from weft.program.kinds import MESSAGES, is_collective, is_compute, is_send
from weft.program.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Where the ranks of a step are that does not go on.

    Attributes:
        at: by rank, for all that have something left: the row that it has come to.
        holding: ranks whose row has not ended though all that it waits for has.
    """

    at: Mapping[int, int]
    holding: tuple[int, ...]


def standstill(program: Program, ended: Mask, absent: Collection[int] = ()) -> Standstill:
    """Who waits, and who holds up the others, when these rows of a step have ended and no other one does.

    What several ranks do together, a collective or a message under way, is held up by all of them that have
    not ended it: it cannot be seen which of them has come to it.

    Args:
        ended: for each row of the program. A message that was sent but not taken counts as received, as a
            receiver may take it only when it needs it.
        absent: ranks that have not begun the step. They hold up all that they take part in.
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
    """Receives of which the send has ended."""
    found = np.zeros(len(program), dtype=np.bool_)
    for send, receive in MESSAGES:
        sends, receives = matched(program, send, receive)
        found[receives[(receives != -1) & ended[sends]]] = True
    return found


def _first_of_ranks(program: Program, rows: Mask) -> dict[int, int]:
    """The first of these rows of each rank that has one; of a rank that has any, the first computation."""
    rank = program.columns.rank
    chosen: dict[int, int] = {}
    for wanted in (rows, rows & is_compute(program.columns.kind)):
        positions = np.flatnonzero(wanted)
        ranks, first = np.unique(rank[positions], return_index=True)
        chosen |= dict(zip(ranks.tolist(), positions[first].tolist(), strict=True))
    return chosen


def events(program: Program) -> Ints:
    """Node of each row: its own, its send's for a receive, the first member's for a collective."""
    node = np.arange(len(program), dtype=np.int64)
    for send, receive in MESSAGES:
        sends, receives = matched(program, send, receive)
        joined = receives != -1
        node[receives[joined]] = sends[joined]
    rows = np.flatnonzero(is_collective(program.columns.kind))
    if len(rows):
        _, first, call = np.unique(collective_codes(program, rows), return_index=True, return_inverse=True)
        node[rows] = rows[first[call]]
    return node


def waits(program: Program, node: Ints) -> tuple[Ints, Ints]:
    """Pairs (source, target) of nodes: the target cannot end before the source has."""
    queue = program.queue
    order = np.argsort(queue, kind="stable")
    follows = np.diff(queue[order]) == 0

    edges = program.edges
    same_cycle = edges.distance == 0
    source, target = edges.source[same_cycle], edges.target[same_cycle]
    # The order of a queue already says what an edge inside it says; a message's own edge became one node.
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
