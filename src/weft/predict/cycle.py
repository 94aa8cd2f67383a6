"""Running one cycle of a Program: when instructions start and end, and what slows them meanwhile.

Where nothing is shared every start is a maximum over ends that come before it, so a worklist in any
topological order gives the same times. Only tasks must be served in order of time: transfers that can meet on
a link, and what runs on a rank where computations and transfers disturb each other. They wait in a heap until
the worklist is empty, for then whatever has not started yet waits for one of them, and the earliest event is
the next. A program without tasks never touches the heap.

A transfer is under way over links: a message over the one by which it leaves its node and the one by which it
enters the other, a collective over those of every node it spans. All have the same capacity, called 1. A
transfer alone uses its demand of every link of its own, all of it for a message, less for a collective that
also waits for latencies. Transfers that overlap on a link share it max-min fairly, none getting more than it
demands: the links that give each of their transfers least decide first, and what these leave over elsewhere
goes to the others (Bertsekas and Gallager, Data Networks, section 6.5.2). Its share over its demand is the
rate at which it proceeds. One that is alone on its links runs at rate 1 from its start to its end; it has no
event in between unless another comes.

Interference, as in Galvatron (Miao et al., VLDB 2023): while a rank computes and a transfer of it is under
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

The functions below run as they stand on lists and compiled by numba, with equal results: on times they use
integers, on rates float64 in one order. They are in one file because numba's cache asks only whether the file
of the function it loads has changed.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

# A task ends at the first tick by which all of it has passed; less than this part of a tick is rounding.
TICK_ROUNDING = 2.0**-20
# Links whose shares differ by less than rounding decide together.
SHARE_ROUNDING = 1.0 + 1e-12
# States of a task.
UNPOSTED, WAITING, UNDER_WAY = 0, 1, 2


class Tasks(NamedTuple):
    """State of the tasks of one cycle; `first_slot[t] : first_slot[t + 1]` are task t on its links.

    All are lists in plain Python, arrays under numba. `row` is where the program has the task, `link` the
    link of a slot and `sharer` its task; `head`, `following` and `preceding` chain the slots that are under
    way on a link. `rate` is the speed, 1 when undisturbed, `remaining` the ticks alone that were left at
    `since`. An event is (tick, task, version), void when the task's version has moved on. `demand` is what a
    task alone uses of each of its links, `limit` the most that its ranks let it have of them. `spare`,
    `users` and `fresh` are the working space of `share_links`.

    Task t disturbs and is disturbed on the ranks `rank[first_rank[t] : first_rank[t + 1]]`, which are places:
    `owner` is the task of a place, `rank_head`, `rank_following` and `rank_preceding` chain the places of the
    transfers under way on a rank, and `computation` is the computation under way there, or -1.
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


def next_end(tasks: Tasks, events: Any, touched: Any, stirred: Any, now: int) -> tuple[int, int]:
    """(tick, task) of the next task that ends, or (`now`, -1) when none is under way.

    `touched` are the links and `stirred` the ranks whose tasks have changed since rates were set: that is
    done only when all that happens at a tick has happened.
    """
    while len(events) > 0 or len(touched) > 0 or len(stirred) > 0:
        if len(events) == 0 or events[0][0] > now:
            if len(stirred) > 0:
                disturb(tasks, events, touched, stirred, now)
            if len(touched) > 0:
                share_links(tasks, events, touched, now)
                continue
            if len(events) == 0:
                continue
        tick, task, version = heapq.heappop(events)
        if version != tasks.version[task]:
            continue
        now = max(now, tick)
        if tasks.state[task] == UNDER_WAY:
            leave_links(tasks, touched, task)
            leave_ranks(tasks, stirred, task)
            return now, task
        tasks.state[task] = UNDER_WAY
        tasks.remaining[task] -= now - tick
        tasks.since[task] = now
        alone = enter_links(tasks, events, touched, task, now)
        if tasks.first_rank[task] < tasks.first_rank[task + 1]:
            enter_ranks(tasks, stirred, task)
        elif alone:
            tasks.fresh[task] = 1.0
            set_rate(tasks, events, task, now)
    return now, -1


def post(
    state: Any,
    first_slot: Any,
    link: Any,
    head: Any,
    since: Any,
    rate: Any,
    first_rank: Any,
    events: Any,
    task: int,
    start: int,
    ticks_alone: int,
) -> None:
    """Let a task start at `start`: now if it has its links to itself, which is undone when others come.

    This and `end_alone` take the lists one by one, for handing over all of them costs more than they do.
    """
    free = first_rank[task] == first_rank[task + 1]
    if free:
        for slot in range(first_slot[task], first_slot[task + 1]):
            if head[link[slot]] >= 0:
                free = False
                break
    if free:
        state[task] = UNDER_WAY
        since[task] = start
        for slot in range(first_slot[task], first_slot[task + 1]):
            head[link[slot]] = slot
        heapq.heappush(events, (start + ticks_alone, task, 0))
    else:
        state[task] = WAITING
        rate[task] = 0.0
        heapq.heappush(events, (start, task, 0))


def end_alone(
    first_slot: Any, link: Any, head: Any, following: Any, version: Any, first_rank: Any, events: Any
) -> int:
    """The transfer whose end is the next event and changes no rate, taken off its links, else -1."""
    first: tuple[int, int, int] = events[0]
    _, task, at = first
    if at != version[task] or first_rank[task] < first_rank[task + 1]:
        return -1
    for slot in range(first_slot[task], first_slot[task + 1]):
        if head[link[slot]] != slot or following[slot] >= 0:
            return -1
    heapq.heappop(events)
    for slot in range(first_slot[task], first_slot[task + 1]):
        head[link[slot]] = -1
    return task


def enter_links(tasks: Tasks, events: Any, touched: Any, task: int, now: int) -> bool:
    """Put a task on its links, if any, and say whether it is alone there."""
    alone = True
    for slot in range(tasks.first_slot[task], tasks.first_slot[task + 1]):
        link = tasks.link[slot]
        first = tasks.head[link]
        if first >= 0 and tasks.since[tasks.sharer[first]] > now:
            # It was let in ahead of its start, which must wait for its turn now.
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
    """Say that something has changed on the links of a task: one will do, for it is on all of them."""
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


def share_links(tasks: Tasks, events: Any, touched: Any, now: int) -> None:
    """New rates and ends for all transfers connected to the links that were touched."""
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
    """Max-min fair shares in `fresh`, by rising levels of the scarcest links and the lowest limits."""
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


def set_rate(tasks: Tasks, events: Any, task: int, now: int) -> None:
    """Give a task its fresh rate and enter its end, unless the rate is what it was."""
    rate = tasks.fresh[task]
    if rate == tasks.rate[task]:
        return
    tasks.remaining[task] -= tasks.rate[task] * (now - tasks.since[task])
    tasks.since[task] = now
    tasks.rate[task] = rate
    tasks.version[task] += 1
    ticks = max(0, math.ceil(tasks.remaining[task] / rate - TICK_ROUNDING))
    heapq.heappush(events, (now + ticks, task, tasks.version[task]))


# `Any`: lists in plain Python, int64 arrays under numba.
def run_cycle(
    start: Any,
    waiting: Any,
    first_successor: Any,
    successor: Any,
    delay: Any,
    occupancy: Any,
    meeting: Any,
    first_member: Any,
    members: Any,
    task_of: Any,
    tasks: Tasks,
    end: Any,
) -> tuple[Any, Any, Any]:
    """Kahn's worklist between the events of tasks. `start` holds the release times, `end` zeros; both are
    filled in.

    What is left in `waiting` belongs to instructions that never started; a meeting some of whose members
    never came leaves 1 at the members that did.
    """
    length = len(start)
    worklist = [node for node in range(length) if waiting[node] == 0]
    missing = [first_member[m + 1] - first_member[m] for m in range(len(first_member) - 1)]
    together = [0 for _ in missing]
    for member in members:
        # Until its meeting starts, a member counts as waiting for it.
        waiting[member] += 1
    events = [(0, 0, 0) for _ in range(0)]
    touched = [0 for _ in range(0)]
    stirred = [0 for _ in range(0)]
    now = 0
    row, first_slot, link = tasks.row, tasks.first_slot, tasks.link
    head, following = tasks.head, tasks.following
    since, rate, state = tasks.since, tasks.rate, tasks.state
    version, first_rank = tasks.version, tasks.first_rank
    while len(worklist) > 0:
        node = worklist.pop()
        low, high = 0, 1
        room = meeting[node]
        task = task_of[node]
        # A task comes back to the worklist at the moment it ends.
        begins = task < 0 or state[task] == UNPOSTED
        ready = start[node]
        if room >= 0:
            low, high = first_member[room], first_member[room + 1]
            if begins:
                missing[room] -= 1
                together[room] = max(together[room], ready)
                ready = together[room]
                if missing[room] > 0:
                    high = low
        if begins and task >= 0 and high > low:
            post(state, first_slot, link, head, since, rate, first_rank, events, task, ready, occupancy[node])
            high = low
        for index in range(low, high):
            starting = node
            if room >= 0:
                starting = members[index]
                start[starting] = together[room]
                waiting[starting] = 0
            ended = now if task >= 0 else start[starting] + occupancy[starting]
            end[starting] = ended
            for edge in range(first_successor[starting], first_successor[starting + 1]):
                follower = successor[edge]
                if ended + delay[edge] > start[follower]:
                    start[follower] = ended + delay[edge]
                left = waiting[follower] - 1
                waiting[follower] = left
                if left == 0 or (left == 1 and meeting[follower] >= 0):
                    worklist.append(follower)
        if len(worklist) == 0:
            task = -1
            if len(touched) == 0 and len(stirred) == 0 and len(events) > 0:
                tick = events[0][0]
                task = end_alone(first_slot, link, head, following, version, first_rank, events)
                if task >= 0:
                    now = tick
            if task < 0:
                now, task = next_end(tasks, events, touched, stirred, now)
            if task >= 0:
                worklist.append(row[task])
    return start, end, waiting


# What numba compiles, each after those it calls.
COMPILED = (
    post,
    end_alone,
    touch_links,
    enter_links,
    leave_links,
    enter_ranks,
    leave_ranks,
    decide,
    fill_links,
    set_rate,
    set_limit,
    share_links,
    disturb,
    next_end,
    run_cycle,
)
