"""Running a cycle: a worklist of instructions between the events of tasks.

Without sharing, every start is a maximum over earlier ends. So a worklist in any topological order gives the
same times. Only tasks need the order of time. Tasks are transfers that can meet on a link, and instructions
on ranks where computations and transfers disturb each other. They wait in a heap until the worklist is empty.
Then every instruction that has not started waits for one of them, and the earliest event is the next. A
program without tasks never touches the heap.

The functions of this package run unchanged on lists, or compiled by numba, with equal results. Times are
integers; rates are float64, computed in one order.
"""

from __future__ import annotations

import heapq
from typing import Any

from weft.predict.cycle.links import enter_links, leave_links, share_links
from weft.predict.cycle.ranks import disturb, enter_ranks, leave_ranks
from weft.predict.cycle.state import UNDER_WAY, UNPOSTED, WAITING, Tasks, set_rate


def next_end(tasks: Tasks, events: Any, touched: Any, stirred: Any, now: int) -> tuple[int, int]:
    """Return (tick, task) of the next task that ends, or (`now`, -1) when none is under way.

    `touched` are the links, and `stirred` the ranks, with changed tasks since the last rates. The rates
    change only after all events of a tick.
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
    """Let a task start at `start`: at once if it is alone on its links; others that come undo this.

    This and `end_alone` take the lists one by one, because passing all of them costs more than the work.
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
    """Return the transfer with the next event, if its end changes no rate, taken off its links; else -1."""
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
    """Run Kahn's worklist between the events of tasks and return (starts, ends, unmet waits).

    `start` holds the release times and `end` zeros; both are filled in. The function is in one piece: a call
    for every instruction makes it about 15 % slower in plain Python. The rest in `waiting` belongs to
    instructions that never started. In a meeting with absent members, the members that came keep 1.
    """
    length = len(start)
    worklist = [node for node in range(length) if waiting[node] == 0]
    missing = [first_member[m + 1] - first_member[m] for m in range(len(first_member) - 1)]
    together = [0 for _ in missing]
    for member in members:
        # A member counts as waiting for its meeting until it starts.
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
        # A task returns to the worklist when it ends.
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
