"""Tasks: instructions of a Program that can slow each other, and the links where transfers can meet.

A route is the set of links of a queue's transfers. A message has two links; a collective has links of every
spanned node. Transfers of one queue follow each other and never meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.predict.costs import Costs
from weft.predict.cycle.state import UNPOSTED, Tasks
from weft.program.arrays import Floats, Ints, Mask
from weft.program.codes import codes, distinct_rows
from weft.program.kinds import is_collective, is_compute, is_send
from weft.program.program import NONE, Program


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Transfers and their links.

    Attributes:
        row, route: row and route of each transfer, in order of rows.
        queue: of each route.
        on, link: pairs of a route and one of its links, in order of routes.
    """

    row: Ints
    route: Ints
    queue: Ints
    on: Ints
    link: Ints

    def slots(self) -> tuple[Ints, Ints]:
        """Return (first, link): `link[first[t] : first[t + 1]]` are the links of transfer t."""
        of_route = np.searchsorted(self.on, np.arange(len(self.queue) + 1))
        count = np.diff(of_route)[self.route]
        first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        place = np.arange(first[-1]) + np.repeat(of_route[self.route] - first[:-1], count)
        return first, self.link[place]


def routes_of(program: Program, costs: Costs, leader: Ints) -> Routes:
    """Return the routes of all messages and collectives that occupy links.

    Args:
        leader: for each row the first row of its meeting, or the row itself; a meeting is one transfer.
    """
    columns, queue = program.columns, program.queue
    messages, used = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    if costs.links is not None:
        messages = np.flatnonzero(costs.links[:, 0] != NONE)
        used = costs.links[messages]
    kept, of_message = distinct_rows(queue[messages], used[:, 0], used[:, 1])
    spanned = costs.group_links if costs.group_links is not None else ((),) * len(program.groups)
    length = np.array([len(links) for links in spanned], dtype=np.int64)
    collectives = np.flatnonzero(is_collective(columns.kind))
    collectives = collectives[leader[collectives] == collectives]
    moves = costs.occupancy[collectives] > 0
    if costs.demand is not None:
        moves &= costs.demand[collectives] > 0.0
    group = columns.group[collectives]
    moves &= (group != NONE) & (np.append(length, 0)[group] > 0)
    collectives, group = collectives[moves], group[moves]
    chosen, of_collective = distinct_rows(queue[collectives], group)
    spans = [np.array(spanned[number], dtype=np.int64) for number in group[chosen].tolist()]
    row = np.concatenate([messages, collectives])
    order = np.argsort(row, kind="stable")
    links_of = np.concatenate([np.full(len(kept), 2), length[group[chosen]]])
    return Routes(
        row=row[order],
        route=np.concatenate([of_message, len(kept) + of_collective])[order],
        queue=np.concatenate([queue[messages[kept]], queue[collectives[chosen]]]),
        on=np.repeat(np.arange(len(links_of)), links_of),
        link=np.concatenate([used[kept].ravel(), *spans]),
    )


def where_they_meet(routes: Routes) -> Routes:
    """Return the transfers that can meet another one, and the links, numbered densely, where they can.

    A link of one queue alone never slows anything. Links of the same routes always give the same shares, so
    one stands for all of them.
    """
    numbers, dense = np.unique(routes.link, return_inverse=True)
    dense = dense.ravel().astype(np.int64)
    one_each, _ = distinct_rows(routes.queue[routes.on], dense)
    shared = np.bincount(dense[one_each], minlength=len(numbers))[dense] > 1
    on, link = routes.on[shared], _alike(routes.on[shared], dense[shared])
    _, once = np.unique(codes(on, link), return_index=True)
    on, link = on[once], link[once]
    met = np.zeros(len(routes.queue), dtype=np.bool_)
    met[on] = True
    meeting = met[routes.route]
    return Routes(row=routes.row[meeting], route=routes.route[meeting], queue=routes.queue, on=on, link=link)


def _alike(on: Ints, link: Ints) -> Ints:
    """Return dense numbers, equal for links of the same routes, in order of the first link of each."""
    order = np.lexsort((on, link))
    ends = np.flatnonzero(np.diff(link[order])) + 1
    known: dict[bytes, int] = {}
    number = np.zeros(int(link.max(initial=NONE)) + 1, dtype=np.int64)
    if not len(link):
        return link
    for routes in np.split(order, ends):
        number[link[routes[0]]] = known.setdefault(on[routes].tobytes(), len(known))
    return number[link]


@dataclass(frozen=True, kw_only=True)
class SimulatedTasks:
    """The instructions that need the order of time.

    Attributes:
        rows: each task's row in the program, rising; for a meeting, its first member.
        of_row: for each row of the program, its task or -1.
        ticks: time of each task when undisturbed.
        first_slot, link: `link[first_slot[t] : first_slot[t + 1]]` are the links that task t can share.
        demand: part of every link that each task uses when undisturbed, more than 0 and at most 1.
        computes: True for computations.
        place_task, place_rank: pairs of a task and a rank where it can be disturbed, in order of tasks;
            ranks have dense numbers.
        computing_rate, transfer_rate: by those ranks, the rates of disturbed tasks, at most 1.
    """

    rows: Ints
    of_row: Ints
    ticks: Ints
    first_slot: Ints
    link: Ints
    demand: Floats
    computes: Mask
    place_task: Ints
    place_rank: Ints
    computing_rate: Floats
    transfer_rate: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _first_place(self) -> Ints:
        return np.searchsorted(self.place_task, np.arange(len(self) + 1)).astype(np.int64)

    def before_the_first(self) -> Tasks:
        """Return the state of all tasks before any instruction has started."""
        tasks, places, ranks = len(self), len(self.place_task), len(self.computing_rate)
        links, slots = int(self.link.max(initial=NONE)) + 1, len(self.link)

        def filled(length: int, value: int) -> Ints:
            return np.full(length, value, dtype=np.int64)

        return Tasks(
            row=self.rows,
            first_slot=self.first_slot,
            link=self.link,
            sharer=np.repeat(np.arange(tasks), np.diff(self.first_slot)),
            head=filled(links, NONE),
            following=filled(slots, NONE),
            preceding=filled(slots, NONE),
            remaining=self.ticks.astype(np.float64),
            since=filled(tasks, 0),
            rate=np.ones(tasks),
            demand=self.demand,
            limit=self.demand.copy(),
            state=filled(tasks, UNPOSTED),
            version=filled(tasks, 0),
            spare=np.zeros(links),
            users=filled(links, NONE),
            fresh=np.zeros(tasks),
            computes=self.computes.astype(np.int64),
            first_rank=self._first_place,
            rank=self.place_rank,
            owner=self.place_task,
            rank_head=filled(ranks, NONE),
            rank_following=filled(places, NONE),
            rank_preceding=filled(places, NONE),
            computation=filled(ranks, NONE),
            computing_rate=self.computing_rate,
            transfer_rate=self.transfer_rate,
        )


def tasks_of(program: Program, costs: Costs, occupancy: Ints, meeting: Ints) -> SimulatedTasks:
    """Return the tasks of a program.

    Args:
        occupancy, meeting: for each row, its ticks and the number of its meeting, or -1; members of one
            meeting start and end together.
    """
    computing, transferring = (
        np.ones(program.ranks) if factors is None else factors
        for factors in (costs.compute_slowdown, costs.communication_slowdown)
    )
    row, rank = _places(program, (computing > 1.0) | (transferring > 1.0), occupancy)
    leader = _leaders(meeting)
    demand = np.ones(len(program)) if costs.demand is None else costs.demand
    flows = where_they_meet(routes_of(program, costs, leader))
    is_task = np.zeros(len(program), dtype=np.bool_)
    is_task[flows.row] = is_task[leader[row]] = True
    rows = np.flatnonzero(is_task)
    of_row = np.full(len(program), NONE, dtype=np.int64)
    of_row[rows] = np.arange(len(rows))
    slots, link = flows.slots()
    count = np.zeros(len(rows), dtype=np.int64)
    count[of_row[flows.row]] = np.diff(slots)
    if len(rows):
        of_row = of_row[leader]
    ranks, dense = np.unique(rank, return_inverse=True)
    order = np.lexsort((dense, of_row[row]))
    return SimulatedTasks(
        rows=rows,
        of_row=of_row,
        ticks=occupancy[rows],
        first_slot=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        link=link,
        demand=np.where(count > 0, demand[rows], 1.0),
        computes=is_compute(program.columns.kind[rows]),
        place_task=of_row[row][order],
        place_rank=dense[order].astype(np.int64),
        computing_rate=1.0 / computing[ranks],
        transfer_rate=1.0 / transferring[ranks],
    )


def _leaders(meeting: Ints) -> Ints:
    """Return for each row the first row of its meeting, or the row itself."""
    leader = np.arange(len(meeting), dtype=np.int64)
    together = np.flatnonzero(meeting != NONE)
    first = np.zeros(int(meeting.max(initial=NONE)) + 1, dtype=np.int64)
    # The last of several values for one place stays.
    first[meeting[together[::-1]]] = together[::-1]
    leader[together] = first[meeting[together]]
    return leader


def _places(program: Program, slowed: Mask, occupancy: Ints) -> tuple[Ints, Ints]:
    """Return (row, rank) of all tasks that can disturb or be disturbed.

    A rank matters if it has both computations and transfers, and would slow some of them (`slowed`).
    """
    columns = program.columns
    if not slowed.any():
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    computes = is_compute(columns.kind)
    lasts = occupancy > 0
    computing = np.flatnonzero(computes & lasts)
    collectives = is_collective(columns.kind)
    sends = np.flatnonzero(is_send(columns.kind) & lasts)
    own = np.concatenate([np.flatnonzero(collectives & lasts), sends])
    transferring = np.concatenate([own, sends])
    at = np.concatenate([columns.rank[own], columns.peer[sends]])
    ranks = np.arange(program.ranks)
    slowed = slowed & np.isin(ranks, columns.rank[computing]) & np.isin(ranks, at)
    row = np.concatenate([computing, transferring])
    rank = np.concatenate([columns.rank[computing], at])
    return row[slowed[rank]], rank[slowed[rank]]
