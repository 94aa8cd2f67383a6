"""Edges between the operations of a step, which are sorted by rank and start.

Rules of dependence are those of MegaScale and of StragglerAnalysis's model. Passes of a rank run one after
the other. A receive is posted behind the pass before the one that it feeds. The first receive of a gradient
is posted behind the second-last forward before the first backward. A message begins when both ends are
posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weft.doors.trace.job.operations import (
    BACKWARD,
    BACKWARD_RECEIVE,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECEIVE,
    FORWARD_SEND,
    GATHER,
    OPERATIONS,
    PASSES,
    REDUCE,
    SEPARATE,
    TYPES,
    Operations,
    PlaceInStep,
)
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.program import NONE

# A message that begins so long behind the last pass that it could feed feeds none.
CLOCK_ERROR_S = 5e-5

# By direction: the pass, its send and its receive, and the step from a stage to the next one.
_WAYS = ((FORWARD, FORWARD_SEND, FORWARD_RECEIVE, 1), (BACKWARD, BACKWARD_SEND, BACKWARD_RECEIVE, -1))
# The order behind the last pass; types that a trace lacks are left out.
_AFTER = tuple(TYPES[one.name] for one in OPERATIONS if one.place is PlaceInStep.AFTER)

Link = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Messages and edges of a step; arrays of shape (rows,).

    Attributes:
        fed: the pass that a message feeds or that made it; -1 for all other rows.
        peer_stage: the stage at the other end of a message, else -1.
        receive_of: the receive of a send, else -1.
        links: pairs (source, target) of rows.
    """

    fed: Ints
    peer_stage: Ints
    receive_of: Ints
    links: Sequence[Link]


def waits_of(first: Operations) -> Waits:
    """Return what each row of a step waits for.

    Raises:
        InputError: when the messages of a rank do not match its passes.
    """
    bounds = np.searchsorted(first.rank, np.arange(first.ranks + 1)).tolist()
    ranks = [np.arange(begin, end) for begin, end in pairwise(bounds)]
    fed = np.full(len(first), NONE)
    for rows in ranks:
        _feed(first, rows, fed)
    peer_stage = _peer_stages(first, fed)
    receive_of = _receives(first, fed, peer_stage)
    links: list[Link] = []
    for rows in ranks:
        links += [*_of_messages(first, rows, fed), *_before(first, rows), *_after(first, rows)]
    links += _both_ends(first, links, receive_of)
    return Waits(fed=fed, peer_stage=peer_stage, receive_of=receive_of, links=links)


def _feed(first: Operations, rows: Ints, fed: Ints) -> None:
    """Write the pass that each message of a rank feeds, or that made it, into `fed`.

    Profilers may record messages at the ends of a step that were never sent; they feed nothing.

    Raises:
        InputError: when the numbers of messages and passes differ.
    """
    own, last = first.model_stage, first.stages * first.chunks - 1
    for compute, send, receive, onwards in _WAYS:
        passes = rows[first.type[rows] == compute]
        if not len(passes):
            continue
        sends, receives = (rows[first.type[rows] == one] for one in (send, receive))
        receives = receives[first.start_s[receives] <= first.start_s[passes].max() + CLOCK_ERROR_S]
        sends = sends[first.end_s[sends] >= first.end_s[passes].min() - CLOCK_ERROR_S]
        for messages, away, without in ((sends, onwards, passes[:-1]), (receives, -onwards, passes[1:])):
            there = own[passes] + away
            among = passes[(there >= 0) & (there <= last)]
            # Either each pass has a message, or each that crosses stages, or all but one at an end.
            fitting = [one for one in (passes, among, without) if len(one) == len(messages)]
            if len(messages) and not fitting:
                what = OPERATIONS[first.type[messages[0]]].name
                rank = f"rank {first.rank[rows[0]]} (stage {first.stage[rows[0]]})"
                problem = f"{rank} has {len(messages)} {what} for {len(passes)} passes"
                raise InputError(Violation(first.name, problem))
            if len(messages):
                fed[messages] = fitting[0]


def _peer_stages(first: Operations, fed: Ints) -> Ints:
    """Return the stage at the other end of each message, -1 for messages that leave the model."""
    peer, own = np.full(len(first), NONE), first.model_stage
    for _, send, receive, onwards in _WAYS:
        for kind, away in ((send, onwards), (receive, -onwards)):
            rows = np.flatnonzero((first.type == kind) & (fed != NONE))
            there = own[fed[rows]] + away
            outside = (there < 0) | (there >= first.stages * first.chunks)
            fed[rows[outside]] = NONE
            peer[rows] = np.where(outside, NONE, there)
    return peer


def _receives(first: Operations, fed: Ints, peer_stage: Ints) -> Ints:
    """Return the receive of each send, -1 where there is none."""
    lane, own = lanes_of(first), first.model_stage
    found = np.full(len(first), NONE)
    for _, send, receive, _ in _WAYS:
        ends: dict[tuple[int, ...], int] = {}
        for row in np.flatnonzero((first.type == receive) & (fed != NONE)).tolist():
            made = fed[row]
            ends[first.replica[row], lane[row], own[made], peer_stage[row], first.micro_batch[made]] = row
        for row in np.flatnonzero((first.type == send) & (fed != NONE)).tolist():
            made = fed[row]
            key = first.replica[row], lane[row], peer_stage[row], own[made], first.micro_batch[made]
            found[row] = ends.get(key, NONE)
    return found


def lanes_of(first: Operations) -> Ints:
    """Return the place of each row's rank among the ranks of its stage and replica."""
    found = np.zeros(len(first), dtype=np.int64)
    ranks = np.unique(np.stack([first.stage, first.replica, first.rank], axis=1), axis=0)
    begins = np.flatnonzero((np.diff(ranks[:, :2], axis=0, prepend=-1) != 0).any(axis=1))
    lane = np.arange(len(ranks)) - np.repeat(begins, np.diff(np.append(begins, len(ranks))))
    found[:] = lane[np.searchsorted(ranks[:, 2], first.rank)]
    return found


def _of_messages(first: Operations, rows: Ints, fed: Ints) -> list[Link]:
    """Return the edges between a rank's messages and passes."""
    links: list[Link] = []
    passes = rows[np.isin(first.type[rows], PASSES)].tolist()
    for compute, send, receive, _ in _WAYS:
        mine = [row for row in passes if first.type[row] == compute]
        before = dict(zip(mine[1:], mine, strict=False))
        for row in rows[(first.type[rows] == send) & (fed[rows] != NONE)].tolist():
            links.append((int(fed[row]), row))
        for row in rows[(first.type[rows] == receive) & (fed[rows] != NONE)].tolist():
            links.append((row, int(fed[row])))
            if int(fed[row]) in before:
                links.append((before[int(fed[row])], row))
    back = next((place for place, row in enumerate(passes) if first.type[row] == BACKWARD), 0)
    gradients = rows[(first.type[rows] == BACKWARD_RECEIVE) & (fed[rows] != NONE)].tolist()
    if back >= 2 and gradients:
        links.append((passes[back - 2], gradients[0]))
    return links


def _before(first: Operations, rows: Ints) -> list[Link]:
    """Return the edges from each chunk's last gather to its first forward."""
    forwards = rows[first.type[rows] == FORWARD]
    links = {}
    for row in rows[first.type[rows] == GATHER].tolist():
        mine = forwards[first.chunk[forwards] == first.chunk[row]]
        if len(mine):
            links[int(mine[0])] = row
    return [(gather, forward) for forward, gather in links.items()]


def _after(first: Operations, rows: Ints) -> list[Link]:
    """Return the edges behind a rank's passes: one operation after the other.

    With separate all-reduces in the trace, reductions of chunks overlap with passes.
    """
    types = first.type[rows]
    passes = rows[np.isin(types, PASSES)]
    last = int(passes[np.argmax(first.end_s[passes])])
    overlapped = bool((first.type == SEPARATE).any())
    chain = [last]
    links: list[Link] = []
    for kind in _AFTER:
        mine = rows[types == kind].tolist()
        if overlapped and kind == REDUCE:
            backwards = rows[types == BACKWARD]
            for row in mine:
                own = backwards[first.chunk[backwards] == first.chunk[row]]
                links += [(int(own[-1]), row)] if len(own) else []
            continue
        chain += mine
    if overlapped and (reductions := rows[types == REDUCE].tolist()):
        # Behind the passes all wait for the last reduction, but the collection of garbage.
        behind = next((row for row in chain[1:] if first.type[row] != TYPES["gc"]), None)
        links += [(reductions[-1], behind)] if behind is not None else []
    return [*links, *pairwise(chain)]


def _both_ends(first: Operations, links: Sequence[Link], receive_of: Ints) -> list[Link]:
    """Return edges to each send from all that its receive waits for: it begins when both are posted."""
    awaited: dict[int, list[int]] = {}
    for source, target in links:
        awaited.setdefault(target, []).append(source)
    before: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(np.isin(first.type, (FORWARD_RECEIVE, BACKWARD_RECEIVE))).tolist():
        # A rank's receives of one direction follow each other.
        queue = int(first.rank[row]), int(first.type[row])
        if queue in before:
            awaited.setdefault(row, []).append(before[queue])
        before[queue] = row
    found: list[Link] = []
    for send in np.flatnonzero(receive_of != NONE).tolist():
        receive = int(receive_of[send])
        found += [(source, send) for source in awaited.get(receive, ())]
        found.append((send, receive))
    return found
