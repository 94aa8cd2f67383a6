"""Interference on ranks: computations and transfers of one rank slow each other.

The model is that of Galvatron (Miao et al., VLDB 2023). A computation and a transfer of one rank are both
slow while they overlap. As soon as one of them ends, the other goes on at full speed. A computation normally
runs at 1. While a message or a collective of its rank is under way, it runs at 1 / `compute_slowdown`. A
computation of several ranks runs at the rate of the slowest. A transfer runs at most at 1 /
`communication_slowdown` of each of its ranks that computes. Computations leave a rank fewer cores and less
memory for its messages. So the limit holds for the whole flow, and others get the rest of its share. This is
max-min fairness with limited rates. A computation of c ticks and a transfer of d ticks, with factors a and b,
begin together. They overlap for min(a c, b d); then the rest of one goes on at full speed. This is
Galvatron's formula. The number of transfers under way on a rank does not matter here: they contend for links.
A reduction that begins before the end of its inputs runs at full speed until then.
"""

from __future__ import annotations

from typing import Any

from weft.predict.cycle.links import touch_links
from weft.predict.cycle.state import Tasks, set_rate


def enter_ranks(tasks: Tasks, stirred: Any, task: int) -> None:
    """Begin to disturb the other tasks on a task's ranks."""
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
    """End the disturbance of the other tasks on a task's ranks."""
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
    """Set new limits of all tasks on the stirred ranks, and new rates of tasks without links."""
    for rank in stirred:
        if tasks.computation[rank] >= 0:
            set_limit(tasks, events, touched, tasks.computation[rank], now)
        place = tasks.rank_head[rank]
        while place >= 0:
            set_limit(tasks, events, touched, tasks.owner[place], now)
            place = tasks.rank_following[place]
    stirred.clear()


def set_limit(tasks: Tasks, events: Any, touched: Any, task: int, now: int) -> None:
    """Set the largest rate that a task's ranks allow: its full demand when nothing disturbs it."""
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
