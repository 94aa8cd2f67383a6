"""Running one cycle of a Program: when instructions start and end, and how messages share links.

Where nothing is shared every start is a maximum over ends that come before it, so a worklist in any
topological order gives the same times. Only flows that can meet on a link must be served in order of time:
they wait in a heap until the worklist is empty, for then whatever has not started yet waits for one of them,
and the earliest event is the next. A program without such flows never touches the heap.

A flow is a message under way over two links: the one by which it leaves its node and the one by which it
enters the other. Both have the same capacity, called 1, so that a flow at rate 1 takes the time it takes
alone. Flows that overlap on a link share it max-min fairly: the links that give each of their flows least
decide first, and what these flows leave over elsewhere goes to the others (Bertsekas and Gallager, Data
Networks, section 6.5.2).

The functions below run as they stand on lists and compiled by numba, with equal results: on times they use
integers, on rates float64 in one order. They are in one file because numba's cache asks only whether the file
of the function it loads has changed.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

# A message ends at the first tick by which all of it has passed; less than this part of a tick is rounding.
TICK_ROUNDING = 2.0**-20
# Links whose shares differ by less than rounding decide together.
SHARE_ROUNDING = 1.0 + 1e-12


class Flows(NamedTuple):
    """State of the flows of one cycle; slots 2 f and 2 f + 1 are flow f on its two links.

    All are lists in plain Python, arrays under numba. `row` is where the program has the flow, `link` the
    link of a slot; `head`, `following` and `preceding` chain the slots that are under way on a link. `rate`
    is a share of a link, `remaining` the ticks alone that were left at `since`. An event is (tick, flow,
    version), void when the flow's version has moved on; version 0 has not been posted, 1 waits for its
    start. `spare`, `users` and `fresh` are the working space of `share_links`.
    """

    row: Any
    link: Any
    head: Any
    following: Any
    preceding: Any
    remaining: Any
    since: Any
    rate: Any
    version: Any
    spare: Any
    users: Any
    fresh: Any


def next_end(flows: Flows, events: Any, touched: Any, ticks_alone: Any, now: int) -> tuple[int, int]:
    """(tick, flow) of the next flow that ends, or (`now`, -1) when none is under way.

    `touched` are the links whose flows have changed since they were shared: that is done only when all that
    happens at a tick has happened. `ticks_alone` is by row of the program.
    """
    while len(events) > 0 or len(touched) > 0:
        if len(touched) > 0 and (len(events) == 0 or events[0][0] > now):
            share_links(flows, events, touched, now)
            continue
        now, flow, version = heapq.heappop(events)
        if version != flows.version[flow]:
            continue
        touched.append(flows.link[2 * flow])
        touched.append(flows.link[2 * flow + 1])
        if version > 1:
            leave_links(flows, flow)
            return now, flow
        enter_links(flows, flow, now, ticks_alone[flows.row[flow]])
    return now, -1


def enter_links(flows: Flows, flow: int, now: int, ticks_alone: int) -> None:
    """Put a flow on its links; it has no rate yet."""
    flows.remaining[flow] = 1.0 * ticks_alone
    flows.since[flow] = now
    for slot in range(2 * flow, 2 * flow + 2):
        first = flows.head[flows.link[slot]]
        flows.following[slot] = first
        if first >= 0:
            flows.preceding[first] = slot
        flows.head[flows.link[slot]] = slot


def leave_links(flows: Flows, flow: int) -> None:
    """Take a flow off its links."""
    for slot in range(2 * flow, 2 * flow + 2):
        before, after = flows.preceding[slot], flows.following[slot]
        if before >= 0:
            flows.following[before] = after
        else:
            flows.head[flows.link[slot]] = after
        if after >= 0:
            flows.preceding[after] = before
        flows.preceding[slot] = -1


def share_links(flows: Flows, events: Any, touched: Any, now: int) -> None:
    """New rates and ends for all flows connected to the links that were touched."""
    affected = [0 for _ in range(0)]
    links = [0 for _ in range(0)]
    for link in touched:
        if flows.users[link] < 0:
            flows.users[link] = 0
            links.append(link)
    touched.clear()
    reached = 0
    while reached < len(links):
        link = links[reached]
        reached += 1
        flows.spare[link] = 1.0
        slot = flows.head[link]
        while slot >= 0:
            flows.users[link] += 1
            other = flows.link[slot ^ 1]
            if flows.users[other] < 0:
                flows.users[other] = 0
                links.append(other)
            if slot % 2 == 0:
                affected.append(slot // 2)
                flows.fresh[slot // 2] = 0.0
            slot = flows.following[slot]
    fill_links(flows, links, len(affected))
    for link in links:
        flows.users[link] = -1
    for flow in affected:
        set_rate(flows, events, flow, now)


def fill_links(flows: Flows, links: Any, undecided: int) -> None:
    """Max-min fair rates in `fresh`, by rising levels of the scarcest links."""
    while undecided > 0:
        level = 1.0
        for link in links:
            if flows.users[link] > 0:
                level = min(level, flows.spare[link] / flows.users[link])
        for link in links:
            if flows.users[link] == 0 or flows.spare[link] > level * SHARE_ROUNDING * flows.users[link]:
                continue
            slot = flows.head[link]
            while slot >= 0:
                if flows.fresh[slot // 2] == 0.0:
                    flows.fresh[slot // 2] = level
                    undecided -= 1
                    for own in (flows.link[slot], flows.link[slot ^ 1]):
                        flows.spare[own] -= level
                        flows.users[own] -= 1
                slot = flows.following[slot]


def set_rate(flows: Flows, events: Any, flow: int, now: int) -> None:
    """Give a flow its fresh rate and enter its end, unless the rate is what it was."""
    rate = flows.fresh[flow]
    if rate == flows.rate[flow]:
        return
    flows.remaining[flow] -= flows.rate[flow] * (now - flows.since[flow])
    flows.since[flow] = now
    flows.rate[flow] = rate
    flows.version[flow] += 1
    ticks = max(0, math.ceil(flows.remaining[flow] / rate - TICK_ROUNDING))
    heapq.heappush(events, (now + ticks, flow, flows.version[flow]))


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
    flow_of: Any,
    flows: Flows,
    end: Any,
) -> tuple[Any, Any, Any]:
    """Kahn's worklist between the events of flows. `start` holds the release times, `end` zeros; both are
    filled in.

    What is left in `waiting` belongs to instructions that never started; a collective some of whose members
    never came leaves 1 at the members that did.
    """
    length = len(start)
    worklist = [node for node in range(length) if waiting[node] == 0]
    missing = [first_member[m + 1] - first_member[m] for m in range(len(first_member) - 1)]
    together = [0 for _ in missing]
    for member in members:
        # Until its collective starts, a member counts as waiting for it.
        waiting[member] += 1
    events = [(0, 0, 0) for _ in range(0)]
    touched = [0 for _ in range(0)]
    now = 0
    while len(worklist) > 0:
        node = worklist.pop()
        low, high = 0, 1
        room = meeting[node]
        flow = flow_of[node]
        if room >= 0:
            missing[room] -= 1
            together[room] = max(together[room], start[node])
            if missing[room] > 0:
                high = 0
            else:
                low, high = first_member[room], first_member[room + 1]
        elif flow >= 0 and flows.version[flow] == 0:
            flows.version[flow] = 1
            heapq.heappush(events, (start[node], flow, 1))
            high = 0
        for index in range(low, high):
            starting = node
            if room >= 0:
                starting = members[index]
                start[starting] = together[room]
                waiting[starting] = 0
            # A flow comes back to the worklist at the moment it ends.
            ended = now if flow >= 0 else start[starting] + occupancy[starting]
            end[starting] = ended
            for edge in range(first_successor[starting], first_successor[starting + 1]):
                follower = successor[edge]
                if ended + delay[edge] > start[follower]:
                    start[follower] = ended + delay[edge]
                waiting[follower] -= 1
                if waiting[follower] == (1 if meeting[follower] >= 0 else 0):
                    worklist.append(follower)
        if len(worklist) == 0:
            now, flow = next_end(flows, events, touched, occupancy, now)
            if flow >= 0:
                worklist.append(flows.row[flow])
    return start, end, waiting


# What numba compiles, each after those it calls.
COMPILED = (enter_links, leave_links, fill_links, set_rate, share_links, next_end, run_cycle)
