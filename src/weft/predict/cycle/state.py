"""The state of the tasks that can be slowed while a cycle runs: their rates and events."""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

# A task ends at the first tick after all of its work; less than this part of a tick is rounding.
TICK_ROUNDING = 2.0**-20
# States of a task.
UNPOSTED, WAITING, UNDER_WAY = 0, 1, 2


class Tasks(NamedTuple):
    """State of the tasks of one cycle. Task t has the slots `first_slot[t] : first_slot[t + 1]` on its links.

    All fields are lists in plain Python, arrays under numba. `row` is the task's row in the program, `link`
    the link of a slot and `sharer` its task. `head`, `following` and `preceding` chain the slots under way on
    a link. `rate` is the speed, 1 when undisturbed; `remaining` is the work left at `since`, in ticks. An
    event is (tick, task, version), void when the task has a newer version. `demand` is the part of each link
    that a task uses alone. `limit` is the largest part that its ranks allow. `spare`, `users` and `fresh` are
    the working space of `share_links`.

    Task t interferes on the ranks `rank[first_rank[t] : first_rank[t + 1]]`; their indices are places.
    `owner` is the task of a place. `rank_head`, `rank_following` and `rank_preceding` chain the places of the
    transfers under way on a rank. `computation` is the computation under way there, or -1.
    """

    row: Any
    first_slot: Any
    link: Any
    sharer: Any
    head: Any
    following: Any
    preceding: Any
    remaining: Any
    since: Any
    rate: Any
    demand: Any
    limit: Any
    state: Any
    version: Any
    spare: Any
    users: Any
    fresh: Any
    computes: Any
    first_rank: Any
    rank: Any
    owner: Any
    rank_head: Any
    rank_following: Any
    rank_preceding: Any
    computation: Any
    computing_rate: Any
    transfer_rate: Any


def set_rate(tasks: Tasks, events: Any, task: int, now: int) -> None:
    """Give a task its fresh rate and enter its end, unless the rate stays the same."""
    rate = tasks.fresh[task]
    if rate == tasks.rate[task]:
        return
    tasks.remaining[task] -= tasks.rate[task] * (now - tasks.since[task])
    tasks.since[task] = now
    tasks.rate[task] = rate
    tasks.version[task] += 1
    ticks = max(0, math.ceil(tasks.remaining[task] / rate - TICK_ROUNDING))
    heapq.heappush(events, (now + ticks, task, tasks.version[task]))
