"""Transfers under way on links, and their max-min fair shares of them.

A message uses the link by which it leaves its node and the link by which it enters the other. A collective
uses links of every node it spans. All links have the same capacity, called 1. A transfer alone uses its
demand of each of its links. A message demands all of a link. A collective that also waits for latencies
demands less. Transfers that overlap on a link share it max-min fairly, and none gets more than it demands.
The links with the smallest share per transfer decide first. The other transfers get the remaining capacity
(Bertsekas and Gallager, Data Networks, section 6.5.2). A transfer proceeds at a rate of its share over its
demand. A transfer alone on its links runs at rate 1 from start to end. It has no event in between unless
another transfer comes.
"""

from __future__ import annotations

import heapq
from typing import Any

from weft.predict.cycle.state import WAITING, Tasks, set_rate

# Links decide together if their shares differ by less than rounding.
SHARE_ROUNDING = 1.0 + 1e-12


def enter_links(tasks: Tasks, events: Any, touched: Any, task: int, now: int) -> bool:
    """Put a task on its links, if any, and return True if it is alone there."""
    alone = True
    for slot in range(tasks.first_slot[task], tasks.first_slot[task + 1]):
        link = tasks.link[slot]
        first = tasks.head[link]
        if first >= 0 and tasks.since[tasks.sharer[first]] > now:
            # It entered ahead of its start; the start must wait for its turn now.
            early = tasks.sharer[first]
            for own in range(tasks.first_slot[early], tasks.first_slot[early + 1]):
                tasks.head[tasks.link[own]] = -1
            tasks.state[early] = WAITING
            tasks.rate[early] = 0.0
            tasks.version[early] += 1
            heapq.heappush(events, (tasks.since[early], early, tasks.version[early]))
            first = -1
        tasks.following[slot] = first
        if first >= 0:
            tasks.preceding[first] = slot
            alone = False
        tasks.head[link] = slot
    if not alone:
        touch_links(tasks, touched, task)
    return alone


def touch_links(tasks: Tasks, touched: Any, task: int) -> None:
    """Mark the links of a task as changed. One of them is enough, because the task is on all of them."""
    if tasks.first_slot[task] < tasks.first_slot[task + 1]:
        touched.append(tasks.link[tasks.first_slot[task]])


def leave_links(tasks: Tasks, touched: Any, task: int) -> None:
    """Take a task off its links, if any."""
    for slot in range(tasks.first_slot[task], tasks.first_slot[task + 1]):
        before, after = tasks.preceding[slot], tasks.following[slot]
        if before >= 0:
            tasks.following[before] = after
        else:
            tasks.head[tasks.link[slot]] = after
        if after >= 0:
            tasks.preceding[after] = before
        if before >= 0 or after >= 0:
            touched.append(tasks.link[slot])
        tasks.preceding[slot] = -1


def share_links(tasks: Tasks, events: Any, touched: Any, now: int) -> None:
    """Set new rates and ends of all transfers connected to the touched links."""
    affected = [0 for _ in range(0)]
    links = [0 for _ in range(0)]
    limited = 0
    for link in touched:
        if tasks.users[link] < 0:
            tasks.users[link] = 0
            links.append(link)
    touched.clear()
    reached = 0
    while reached < len(links):
        link = links[reached]
        reached += 1
        tasks.spare[link] = 1.0
        slot = tasks.head[link]
        while slot >= 0:
            tasks.users[link] += 1
            task = tasks.sharer[slot]
            if tasks.fresh[task] >= 0.0:
                tasks.fresh[task] = -1.0
                affected.append(task)
                if tasks.limit[task] < 1.0:
                    limited += 1
                for own in range(tasks.first_slot[task], tasks.first_slot[task + 1]):
                    other = tasks.link[own]
                    if tasks.users[other] < 0:
                        tasks.users[other] = 0
                        links.append(other)
            slot = tasks.following[slot]
    fill_links(tasks, links, affected, limited)
    for link in links:
        tasks.users[link] = -1
    for task in affected:
        tasks.fresh[task] /= tasks.demand[task]
        set_rate(tasks, events, task, now)


def fill_links(tasks: Tasks, links: Any, affected: Any, limited: int) -> None:
    """Set max-min fair shares in `fresh`, by rising levels of the scarcest links and the lowest limits."""
    undecided = len(affected)
    while undecided > 0:
        level = 1.0
        for link in links:
            if tasks.users[link] > 0:
                level = min(level, tasks.spare[link] / tasks.users[link])
        if limited > 0:
            lowest = level
            for task in affected:
                if tasks.fresh[task] < 0.0:
                    lowest = min(lowest, tasks.limit[task])
            if lowest < level:
                for task in affected:
                    if tasks.fresh[task] < 0.0 and tasks.limit[task] == lowest:
                        decide(tasks, task, lowest)
                        undecided -= 1
                        limited -= 1
                continue
        for link in links:
            if tasks.users[link] == 0 or tasks.spare[link] > level * SHARE_ROUNDING * tasks.users[link]:
                continue
            slot = tasks.head[link]
            while slot >= 0:
                task = tasks.sharer[slot]
                if tasks.fresh[task] < 0.0:
                    decide(tasks, task, level)
                    undecided -= 1
                slot = tasks.following[slot]


def decide(tasks: Tasks, task: int, level: float) -> None:
    """Give a transfer its share of all its links."""
    tasks.fresh[task] = level
    for slot in range(tasks.first_slot[task], tasks.first_slot[task + 1]):
        tasks.spare[tasks.link[slot]] -= level
        tasks.users[tasks.link[slot]] -= 1
