"""Collectives and messages that meet on the links of their nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import by_hand, costs_of

from weft.methods.sharding.kinds import REDUCE
from weft.predict.costs import Costs
from weft.predict.simulator import Simulation, simulate
from weft.program.kinds import BACKWARD, FORWARD, SEND_ACTIVATION
from weft.program.program import Edges, Program

SECOND_NS = 10**9


def both(program: Program, costs: Costs, **options: object) -> Simulation:
    """What both engines agree on."""
    plain, compiled = (simulate(program, costs, compiled=one, **options) for one in (False, True))
    for name in ("posted_ns", "start_ns", "end_ns"):
        assert np.array_equal(getattr(plain.timeline, name), getattr(compiled.timeline, name))
    return plain


def spans(program: Program, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends in ticks of the rows of one cycle."""
    timeline = both(program, costs, max_cycles=1).timeline
    order = np.argsort(timeline.position)
    return timeline.start_ns[order] // SECOND_NS, timeline.end_ns[order] // SECOND_NS


def transfers(
    starts: list[int], alone: list[int], links: list[tuple[int, ...]], demand: list[float] | None = None
) -> tuple[Program, Costs]:
    """On a rank each, after a computation: a message where two links are given, else a ring of two ranks."""
    rings = [number for number, some in enumerate(links) if len(some) != 2]
    rows, group, spans_of = [], [], []
    for number in range(len(links)):
        ring = number in rings
        for rank in (2 * number, 2 * number + 1)[: 2 if ring else 1]:
            rows += [(rank, FORWARD, number), (rank, REDUCE if ring else SEND_ACTIVATION, number)]
            group += [-1, rings.index(number) if ring else -1]
            spans_of += [number, number]
    first = np.arange(0, len(rows), 2)
    program = by_hand(rows, [(row, row + 1, 0) for row in first.tolist()])
    groups = tuple((2 * number, 2 * number + 1) for number in rings)
    program = replace(program, columns=replace(program.columns, group=np.array(group)), groups=groups)
    kind = program.columns.kind
    occupancy = np.where(kind == FORWARD, np.array(starts)[spans_of], np.array(alone)[spans_of])
    own = [
        links[number] if code == SEND_ACTIVATION else (-1, -1)
        for number, code in zip(spans_of, kind, strict=True)
    ]
    return program, replace(
        costs_of(program, occupancy),
        links=np.array(own, dtype=np.int64).reshape(-1, 2),
        group_links=tuple(links[number] for number in rings),
        demand=None if demand is None else np.array(demand)[spans_of],
    )


def end_times(
    starts: list[int], alone: list[int], links: list[tuple[int, ...]], demand: list[float] | None = None
) -> list[int]:
    program, costs = transfers(starts, alone, links, demand)
    moved = program.columns.kind != FORWARD
    return [
        ends.tolist()[0]
        for number in range(len(starts))
        for ends in [np.unique(spans(program, costs)[1][moved & (program.columns.stage == number)])]
        if len(ends) == 1
    ]


RING = (0, 1, 2, 3)
"""Leaving and entering two nodes."""


@pytest.mark.parametrize(
    ("starts", "alone", "links", "demand", "ends"),
    [
        # A ring alone, whatever it demands, and two over the same nodes.
        ([0], [6], [RING], None, [6]),
        ([0, 0], [6, 6], [RING, RING], None, [12, 12]),
        ([0, 0], [6, 6], [(0, 1, 2, 3), (4, 5, 6, 7)], None, [6, 6]),
        # Two that share one link of one node, the second of which comes when half of the first has passed.
        ([0, 0], [6, 6], [(0, 1, 2, 3), (3, 4, 5, 6)], None, [12, 12]),
        ([0, 5], [10, 10], [(0, 1, 2, 3), (3, 4, 5, 6)], None, [15, 20]),
        # A message ends when half of the ring has passed, which goes on alone.
        ([0, 0], [10, 5], [RING, (0, 9)], None, [15, 10]),
        # A ring is as slow as its busiest link, a third of which it has beside two messages; the third
        # message, elsewhere, has the two thirds that the ring leaves.
        ([0, 0, 0, 0], [6, 6, 6, 12], [RING, (0, 9), (0, 8), (7, 3)], None, [18, 18, 18, 18]),
        # A ring over four nodes with one busy link; it is done with what the busy link gives.
        ([0, 0], [8, 2], [tuple(range(8)), (5, 9)], None, [10, 4]),
        # Rings that wait for latencies most of the time do not disturb each other ...
        ([0, 0], [6, 6], [RING, RING], [0.5, 0.5], [6, 6]),
        # ... and leave the rest to a message; three of them are as fast as their bytes.
        ([0, 0], [8, 6], [RING, (0, 9)], [0.25, 1.0], [8, 8]),
        ([0, 0, 0], [6, 6, 6], [RING, RING, RING], [0.5, 0.5, 0.5], [9, 9, 9]),
        # Nothing to move disturbs nobody.
        ([0, 0], [6, 6], [RING, RING], [1.0, 0.0], [6, 6]),
    ],
)
def test_collectives_share_the_links_they_meet_on(starts, alone, links, demand, ends) -> None:
    assert end_times(starts, alone, links, demand) == ends


def test_a_ring_shares_only_while_it_runs() -> None:
    """It starts when its second member is ready, at 8; a message of 6 before that is alone."""
    program = by_hand(
        [(0, REDUCE, 0), (1, FORWARD, 0), (1, REDUCE, 0), (2, SEND_ACTIVATION, 0)],
        [(1, 2, 0)],
        groups=((0, 1),),
    )
    costs = replace(
        costs_of(program, [4, 8, 4, 10]),
        links=np.array([(-1, -1), (-1, -1), (-1, -1), (0, 9)]),
        group_links=(RING,),
    )
    start, end = spans(program, costs)
    assert start.tolist() == [8, 0, 8, 0]
    assert end.tolist() == [14, 8, 14, 12]


@st.composite
def rings_and_messages(draw: st.DrawFn) -> tuple[list[int], list[int], list[tuple[int, ...]], list[float]]:
    """Up to six transfers over eight links; messages demand all of them."""
    ring = st.sets(st.integers(0, 7), min_size=3, max_size=6).map(sorted).map(tuple)
    message = st.tuples(st.integers(0, 3), st.integers(4, 7))
    links = draw(st.lists(st.one_of(ring, message), min_size=1, max_size=6))
    times = st.lists(st.integers(0, 12), min_size=len(links), max_size=len(links))
    demand = [1.0 if len(some) == 2 else draw(st.sampled_from([0.125, 0.3, 0.5, 1.0])) for some in links]
    return draw(times), [time + 1 for time in draw(times)], links, demand


@given(rings_and_messages())
def test_nothing_is_faster_than_alone_or_slower_than_if_all_always_met(flows) -> None:
    starts, _, links, _ = flows
    users = np.bincount([link for some in links for link in set(some)], minlength=8)
    for start, time, some, part, end in zip(*flows, end_times(*flows), strict=True):
        most = max(1.0, part * max(users[link] for link in some))
        # An end is a whole tick, and so may be those of the others before it.
        assert start + time <= end <= start + np.ceil(time * most) + len(starts)


@given(rings_and_messages())
def test_no_link_carries_more_than_it_can(flows) -> None:
    starts, alone, links, demand = flows
    ends = end_times(*flows)
    for link in range(8):
        on_it = [flow for flow, some in enumerate(links) if link in some]
        for first in starts:
            for last in ends:
                inside = [flow for flow in on_it if starts[flow] >= first and ends[flow] <= last]
                assert sum(alone[flow] * demand[flow] for flow in inside) <= max(0, last - first) + 1e-6


def test_a_later_cycle_shares_as_the_first_does() -> None:
    program, costs = transfers([1, 1], [4, 4], [RING, RING])
    back = [(row, row - 1, 1) for row in range(1, len(program), 2)]
    source, target, distance = np.array(back).T
    edges = Edges.join([program.edges, Edges(source=source, target=target, distance=distance)])
    program = replace(program, edges=edges)
    simulation = both(program, costs)
    assert (simulation.first_step_s, simulation.step_s, simulation.steady) == (9, 9, True)


def reductions(count: int, lead: int, rest: int) -> tuple[Program, Costs]:
    """`count` rings of two ranks, each behind a backward of 10 ticks; alone they take 4."""
    program, costs = transfers([10] * count, [4] * count, [RING] * count)
    kind = np.where(program.columns.kind == FORWARD, BACKWARD, program.columns.kind)
    program = replace(program, columns=replace(program.columns, kind=kind))
    reduces = kind == REDUCE
    return program, replace(costs, lead=lead * reduces, rest=rest * reduces)


@pytest.mark.parametrize(
    ("count", "lead", "rest", "start", "end"),
    [
        # Three of four layers beside the backward, alone and as if two met that do not.
        (1, 3, 1, 7, 11),
        (1, 6, 1, 4, 11),
        # Two that do meet, started for that and for being alone.
        (2, 6, 1, 4, 12),
        (2, 3, 1, 7, 15),
        # Nothing is left when the backward ends, but it does end first.
        (1, 6, 0, 4, 10),
        (1, 0, 3, 10, 14),
    ],
)
def test_a_reduction_ends_no_sooner_than_its_rest_after_the_backward(count, lead, rest, start, end) -> None:
    program, costs = reductions(count, lead, rest)
    starts, ends = spans(program, costs)
    reduces = program.columns.kind == REDUCE
    assert set(starts[reduces].tolist()) == {start}
    assert set(ends[reduces].tolist()) == {end}


def test_what_waits_for_a_late_reduction_waits_for_its_rest() -> None:
    """A member whose backward ends at 10 holds both back, and their followers and the next of their queue."""
    rows = [(rank, kind, 0) for rank in (0, 1) for kind in (BACKWARD, REDUCE, FORWARD)]
    program = by_hand(
        rows, [(0, 1, 0), (1, 2, 0), (3, 4, 0), (4, 5, 0), (2, 0, 1), (5, 3, 1)], groups=((0, 1),)
    )
    costs = costs_of(program, [6, 4, 5, 10, 4, 5], [0, 1, 0, 0, 1, 0])
    costs = replace(costs, lead=np.array([0, 8, 0, 0, 8, 0]), rest=np.array([0, 1, 0, 0, 1, 0]))
    start, end = spans(program, costs)
    assert start.tolist() == [0, 2, 12, 0, 2, 12]
    assert end.tolist() == [6, 11, 17, 10, 11, 17]
    simulation = both(program, costs)
    assert (simulation.step_s, simulation.steady) == (17, True)
