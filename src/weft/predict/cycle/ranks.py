"""Interference on ranks: computations and transfers of one rank slow each other.

As in Galvatron (Miao et al., VLDB 2023): while a rank computes and a transfer of it is under
way, both are slow; as soon as one of them ends, the other goes on at full speed. A computation runs at
1 / `compute_slowdown` of its rank while a message leaves or enters the rank or a collective of it runs, and
at 1 otherwise; one that several ranks do together runs at the rate of the slowest. A transfer runs at most at
1 / `communication_slowdown` of each of its ranks that computes: what a rank puts on a link or takes from it
is what its computations leave of its cores and memory, so that this limits the flow wherever it goes, and the
rest of its share is left to others: max-min fairness with limited rates. A computation of c ticks and a
transfer of d that begin together, with factors a and b, thus overlap for min(a c, b d), after which what is
left of one goes on at full speed, which is Galvatron's formula. How many transfers a rank has under way makes
no difference: they contend for links, which is counted there. A reduction that begins before what it waits
for has ended has gone at full speed until then.
"""

from __future__ import annotations

from typing import Any

from weft.predict.cycle.links import touch_links
from weft.predict.cycle.state import Tasks, set_rate


def enter_ranks(tasks: Tasks, stirred: Any, task: int) -> None:
    """Begin to disturb what runs on a task's ranks."""
    for place in range(tasks.first_rank[task], tasks.first_rank[task + 1]):
        rank = tasks.rank[place]
        stirred.append(rank)
        if tasks.computes[task] == 1:
            tasks.computation[rank] = task
            continue
        first = tasks.rank_head[rank]
        tasks.rank_following[place] = first
        if first >= 0:
            tasks.rank_preceding[first] = place
        tasks.rank_head[rank] = place


def leave_ranks(tasks: Tasks, stirred: Any, task: int) -> None:
    """Disturb nothing any more."""
    for place in range(tasks.first_rank[task], tasks.first_rank[task + 1]):
        rank = tasks.rank[place]
        stirred.append(rank)
        if tasks.computes[task] == 1:
            tasks.computation[rank] = -1
            continue
        before, after = tasks.rank_preceding[place], tasks.rank_following[place]
        if before >= 0:
            tasks.rank_following[before] = after
        else:
            tasks.rank_head[rank] = after
        if after >= 0:
            tasks.rank_preceding[after] = before
        tasks.rank_preceding[place] = -1


def disturb(tasks: Tasks, events: Any, touched: Any, stirred: Any, now: int) -> None:
    """New limits for all tasks on the ranks that were stirred, and new rates where no link has a say."""
    for rank in stirred:
        if tasks.computation[rank] >= 0:
            set_limit(tasks, events, touched, tasks.computation[rank], now)
        place = tasks.rank_head[rank]
        while place >= 0:
            set_limit(tasks, events, touched, tasks.owner[place], now)
            place = tasks.rank_following[place]
    stirred.clear()


def set_limit(tasks: Tasks, events: Any, touched: Any, task: int, now: int) -> None:
    """The most a task's ranks let it have: all of it when it is the only thing they do."""
    limit = 1.0
    for place in range(tasks.first_rank[task], tasks.first_rank[task + 1]):
        rank = tasks.rank[place]
        if tasks.computes[task] == 1:
            if tasks.rank_head[rank] >= 0:
                limit = min(limit, tasks.computing_rate[rank])
        elif tasks.computation[rank] >= 0:
            limit = min(limit, tasks.transfer_rate[rank])
    limit *= tasks.demand[task]
    if tasks.first_slot[task] == tasks.first_slot[task + 1]:
        tasks.fresh[task] = limit
        set_rate(tasks, events, task, now)
    elif limit != tasks.limit[task] or tasks.rate[task] == 0.0:
        tasks.limit[task] = limit
        touch_links(tasks, touched, task)
