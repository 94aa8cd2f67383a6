"""Which transfers of a Program can meet, and on which links.

A route is the set of links that transfers of one queue take: the two of a message, or those of every node
that a collective spans. Transfers of one queue follow each other and never meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.predict.costs import Costs
from weft.program.codes import codes, distinct_rows
from weft.program.kinds import is_collective
from weft.program.program import NONE, Ints, Program


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Transfers and their links.

    Attributes:
        row, route: of each transfer, in order of rows: where the program has it, and which route it takes.
        queue: of each route.
        on, link: pairs of a route and one of its links, in order of routes.
    """

    row: Ints
    route: Ints
    queue: Ints
    on: Ints
    link: Ints

    def slots(self) -> tuple[Ints, Ints]:
        """(first, link): `link[first[t] : first[t + 1]]` are the links of transfer t."""
        of_route = np.searchsorted(self.on, np.arange(len(self.queue) + 1))
        count = np.diff(of_route)[self.route]
        first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        place = np.arange(first[-1]) + np.repeat(of_route[self.route] - first[:-1], count)
        return first, self.link[place]


def routes_of(program: Program, costs: Costs, leader: Ints) -> Routes:
    """The routes of all messages and collectives that occupy links.

    Args:
        leader: of each row the first row of its meeting, or itself; a meeting is one transfer.
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
    """The transfers that can meet another one, and the links, numbered densely, on which they can.

    A link of one queue alone never slows anything, and links of the same routes always give the same shares,
    so that one stands for all of them.
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
    """Dense numbers that are equal for links of the same routes, in order of the first link of each."""
    order = np.lexsort((on, link))
    ends = np.flatnonzero(np.diff(link[order])) + 1
    known: dict[bytes, int] = {}
    number = np.zeros(int(link.max(initial=NONE)) + 1, dtype=np.int64)
    if not len(link):
        return link
    for routes in np.split(order, ends):
        number[link[routes[0]]] = known.setdefault(on[routes].tobytes(), len(known))
    return number[link]
