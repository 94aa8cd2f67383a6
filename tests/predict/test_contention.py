from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import by_hand, costs_of, random_programs

from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.predict.tasks import Routes, where_they_meet
from weft.program.kinds import FORWARD, SEND_ACTIVATION
from weft.program.program import Program

SECOND_NS = 10**9


def with_links(program: Program, occupancy: object, links: list[tuple[int, int]]) -> Costs:
    return replace(costs_of(program, occupancy), links=np.array(links, dtype=np.int64).reshape(-1, 2))


def sends(count: int) -> Program:
    """One send per rank, each after a computation."""
    rows = [row for rank in range(count) for row in ((rank, FORWARD, 0), (rank, SEND_ACTIVATION, 0))]
    return by_hand(rows, [(2 * rank, 2 * rank + 1, 0) for rank in range(count)])


def end_times(starts: list[int], alone: list[int], links: list[tuple[int, int]]) -> list[int]:
    """When sends end that are ready at `starts`, by both engines."""
    program = sends(len(starts))
    occupancy = [time for pair in zip(starts, alone, strict=True) for time in pair]
    every = [link for pair in links for link in ((-1, -1), pair)]
    costs = with_links(program, occupancy, every)
    answers = []
    for compiled in (False, True):
        timeline = simulate(program, costs, max_cycles=1, compiled=compiled).timeline
        order = np.argsort(timeline.position)
        answers.append((timeline.end_ns[order][1::2] // SECOND_NS).tolist())
    assert answers[0] == answers[1]
    return answers[0]


@st.composite
def linked_programs(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Random programs whose sends use one of three links to leave and one of three to arrive, or none."""
    program = draw(random_programs())
    times = st.lists(st.integers(0, 20), min_size=len(program), max_size=len(program))
    pair = st.one_of(st.just((-1, -1)), st.tuples(st.integers(0, 2), st.integers(3, 5)))
    links = [draw(pair) if kind == SEND_ACTIVATION else (-1, -1) for kind in program.columns.kind.tolist()]
    return program, with_links(program, draw(times), links)


@given(linked_programs())
def test_both_engines_agree_exactly_on_shared_links(linked) -> None:
    program, costs = linked
    plain, compiled = (simulate(program, costs, compiled=compiled) for compiled in (False, True))
    for name in ("posted_ns", "start_ns", "end_ns"):
        assert np.array_equal(getattr(plain.timeline, name), getattr(compiled.timeline, name))


@given(linked_programs())
def test_links_that_nobody_shares_change_nothing(linked) -> None:
    program, costs = linked
    own = np.stack([2 * program.queue, 2 * program.queue + 1], axis=1)
    own[program.columns.kind != SEND_ACTIVATION] = -1
    apart, free = (simulate(program, replace(costs, links=links)) for links in (own, None))
    assert (apart.step_s, apart.cycles) == (free.step_s, free.cycles)
    assert np.array_equal(apart.timeline.start_ns, free.timeline.start_ns)
    assert np.array_equal(apart.timeline.end_ns, free.timeline.end_ns)


@given(linked_programs())
def test_nobody_gains_time_and_no_link_carries_more_than_it_can(linked) -> None:
    program, costs = linked
    timeline = simulate(program, costs, max_cycles=1).timeline
    order = np.argsort(timeline.position)
    start, end = (time[order] / SECOND_NS for time in (timeline.start_ns, timeline.end_ns))
    assert (end - start >= costs.occupancy).all()
    for link in range(6):
        on_it = (costs.links == link).any(axis=1)
        for first in start[on_it]:
            for last in end[on_it]:
                inside = on_it & (start >= first) & (end <= last)
                assert costs.occupancy[inside].sum() <= max(0, last - first)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.integers(3, 5)),
        min_size=1,
        max_size=6,
    )
)
def test_ends_are_those_of_fair_shares_computed_from_their_definition(flows) -> None:
    """Raise all rates together; a rate stops where its link is full. Time goes in steps of one event."""
    starts, alone, links = [f[0] for f in flows], [f[1] for f in flows], [f[2:] for f in flows]
    left, ends, now = dict(enumerate(map(float, alone))), {}, 0.0
    while left:
        active = [flow for flow in left if starts[flow] <= now]
        rates: dict[int, float] = {}
        for _ in active:
            room = {}
            for link in range(6):
                users = [flow for flow in active if link in links[flow]]
                free = [flow for flow in users if flow not in rates]
                if free:
                    room[link] = (1.0 - sum(rates.get(flow, 0.0) for flow in users)) / len(free)
            if room:
                level = min(room.values())
                tight = {link for link, share in room.items() if share <= level + 1e-9}
                rates.update(
                    {flow: level for flow in active if flow not in rates and tight & set(links[flow])}
                )
        coming = [float(starts[flow]) for flow in left if starts[flow] > now]
        # Ends are whole ticks: a flow keeps its links until its tick is over.
        finishing = {flow: now + max(0.0, np.ceil(left[flow] / rates[flow] - 1e-6)) for flow in active}
        then = min([*coming, *finishing.values()])
        for flow in active:
            left[flow] -= rates[flow] * (then - now)
            if finishing[flow] <= then:
                ends[flow] = int(then)
                del left[flow]
        now = then
    assert end_times(starts, alone, links) == [ends[flow] for flow in range(len(flows))]


@pytest.mark.parametrize(
    ("starts", "alone", "links", "ends"),
    [
        # Alone; then two and three that leave the same node together.
        ([0], [6], [(0, 3)], [6]),
        ([0, 0], [6, 6], [(0, 3), (0, 4)], [12, 12]),
        ([0, 0, 0], [6, 6, 6], [(0, 3), (0, 4), (0, 5)], [18, 18, 18]),
        # The shorter ends at 4, the longer has 4 left and goes on alone.
        ([0, 0], [2, 6], [(0, 3), (0, 4)], [4, 8]),
        # The second comes when half of the first has passed.
        ([0, 5], [10, 10], [(0, 3), (0, 4)], [15, 20]),
        # Into one node from two, and past each other without meeting.
        ([0, 0], [6, 6], [(0, 3), (1, 3)], [12, 12]),
        ([0, 0], [6, 6], [(0, 3), (1, 4)], [6, 6]),
        # Two fill a third each of what the fourth link leaves: 1/3 for three flows, 2/3 for the last.
        ([0, 0, 0, 0], [6, 6, 6, 12], [(0, 3), (0, 4), (0, 5), (1, 5)], [18, 18, 18, 18]),
        # Nothing to send takes no time and disturbs nobody.
        ([0, 3], [10, 0], [(0, 3), (0, 4)], [10, 3]),
    ],
)
def test_messages_share_the_links_they_meet_on(starts, alone, links, ends) -> None:
    assert end_times(starts, alone, links) == ends


def test_a_later_cycle_shares_as_the_first_does() -> None:
    program = sends(2)
    rows = np.flatnonzero(program.columns.kind == FORWARD)
    edges = replace(
        program.edges,
        source=np.append(program.edges.source, [1, 3, 1, 3]),
        target=np.append(program.edges.target, [rows[0], rows[0], rows[1], rows[1]]),
        distance=np.append(program.edges.distance, [1, 1, 1, 1]),
    )
    program = replace(program, edges=edges)
    costs = with_links(program, [1, 4, 1, 4], [(-1, -1), (0, 1), (-1, -1), (0, 1)])
    simulation = simulate(program, costs)
    assert (simulation.first_step_s, simulation.step_s, simulation.steady) == (9, 9, True)


def routes(queue: list[int], links: list[tuple[int, ...]]) -> Routes:
    """One transfer for each route."""
    own = np.arange(len(queue))
    return Routes(
        row=own,
        route=own,
        queue=np.array(queue),
        on=np.repeat(own, [len(some) for some in links]),
        link=np.array([link for some in links for link in some]),
    )


def slots_of(met: Routes) -> list[list[int]]:
    first, link = met.slots()
    return [some.tolist() for some in np.split(link, first[1:-1])]


def test_only_transfers_of_different_queues_on_one_link_can_meet() -> None:
    """Rows 0 and 1 are one queue, row 2 enters where they do; row 3 is alone."""
    met = where_they_meet(routes([0, 0, 2, 3], [(10, 11), (10, 11), (12, 11), (20, 21)]))
    assert met.row.tolist() == [0, 1, 2]
    assert slots_of(met) == [[0], [0], [0]]
    assert len(where_they_meet(routes([0, 0, 3], [(10, 11), (10, 11), (20, 21)])).row) == 0


def test_links_of_the_same_transfers_are_one() -> None:
    """Two rings over the same two nodes, the first of which also sends a message."""
    met = where_they_meet(routes([0, 1, 2], [(0, 1, 2, 3), (0, 1, 2, 3), (0, 9)]))
    assert slots_of(met) == [[0, 1], [0, 1], [0]]
