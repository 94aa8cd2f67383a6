"""Computations and transfers of one rank that slow each other while they overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import by_hand, costs_of, random_programs

from weft.methods.sharding.kinds import REDUCE
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.kinds import BACKWARD, FORWARD, SEND_ACTIVATION
from weft.program.program import Program

SECOND_NS = 10**9
FACTORS = st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0])


def slowed(costs: Costs, program: Program, compute: object, communication: object) -> Costs:
    ones = np.ones(program.ranks)
    return replace(costs, compute_slowdown=compute * ones, communication_slowdown=communication * ones)


def spans(program: Program, costs: Costs, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends in ticks of the rows of one cycle, for which both engines agree."""
    answers = []
    for compiled in (False, True):
        timeline = simulate(program, costs, max_cycles=1, compiled=compiled, **options).timeline
        order = np.argsort(timeline.position)
        answers.append([time[order] // SECOND_NS for time in (timeline.start_ns, timeline.end_ns)])
    assert np.array_equal(answers[0], answers[1])
    return answers[0][0], answers[0][1]


@st.composite
def priced_programs(draw: st.DrawFn, *, linked: bool = True) -> tuple[Program, Costs]:
    program = draw(random_programs())
    costs = costs_of(
        program, draw(st.lists(st.integers(0, 20), min_size=len(program), max_size=len(program)))
    )
    if linked:
        pair = st.one_of(st.just((-1, -1)), st.tuples(st.integers(0, 1), st.integers(2, 3)))
        links = [
            draw(pair) if kind == SEND_ACTIVATION else (-1, -1) for kind in program.columns.kind.tolist()
        ]
        costs = replace(costs, links=np.array(links, dtype=np.int64).reshape(-1, 2))
    factors = [np.array([draw(FACTORS) for _ in range(program.ranks)]) for _ in range(2)]
    return program, replace(costs, compute_slowdown=factors[0], communication_slowdown=factors[1])


@given(priced_programs())
def test_factors_of_one_change_nothing(priced) -> None:
    program, costs = priced
    none = replace(costs, compute_slowdown=None, communication_slowdown=None)
    one, without = (simulate(program, priced) for priced in (slowed(costs, program, 1.0, 1.0), none))
    assert np.array_equal(one.timeline.start_ns, without.timeline.start_ns)
    assert np.array_equal(one.timeline.end_ns, without.timeline.end_ns)
    assert (one.step_s, one.cycles) == (without.step_s, without.cycles)


@given(priced_programs())
def test_both_engines_agree_and_nothing_is_faster_than_alone(priced) -> None:
    program, costs = priced
    start, end = spans(program, costs)
    assert (end - start >= costs.occupancy).all()
    plain, compiled = (simulate(program, costs, compiled=compiled) for compiled in (False, True))
    assert np.array_equal(plain.timeline.end_ns, compiled.timeline.end_ns)


@given(priced_programs(linked=False))
def test_nothing_ends_later_than_if_it_were_slow_all_the_time(priced) -> None:
    program, costs = priced
    sends = program.columns.kind == SEND_ACTIVATION
    rank, peer = program.columns.rank, np.maximum(program.columns.peer, 0)
    transfers = np.maximum(costs.communication_slowdown[rank], costs.communication_slowdown[peer])
    worst = np.where(sends, transfers, costs.compute_slowdown[rank])
    # A task ends at a whole tick, up to one late each time.
    longest = replace(
        costs,
        occupancy=np.ceil(worst * costs.occupancy).astype(np.int64) + 1,
        compute_slowdown=None,
        communication_slowdown=None,
    )
    start, end = spans(program, costs)
    assert (end - start <= longest.occupancy).all()
    assert (end <= spans(program, longest)[1]).all()


@st.composite
def unconnected(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Two ranks that compute and send to each other, each thing ready at a time that depends on no other."""
    kinds = draw(st.lists(st.sampled_from([FORWARD, SEND_ACTIVATION]), min_size=2, max_size=8))
    rows = [(rank, kind, 0) for rank in (0, 1) for kind in kinds]
    return by_hand(rows, []), draw(st.lists(st.integers(0, 20), min_size=len(rows), max_size=len(rows)))


@given(unconnected(), FACTORS, FACTORS, FACTORS, FACTORS)
def test_larger_factors_never_help_where_nothing_waits_for_anything(jobs, c1, c2, m1, m2) -> None:
    """With edges they can: what is delayed may overlap with less."""
    program, occupancy = jobs
    costs = costs_of(program, occupancy)
    low = slowed(costs, program, min(c1, c2), min(m1, m2))
    high = slowed(costs, program, max(c1, c2), max(m1, m2))
    # Rounding up to ticks may turn a late end by one.
    assert (spans(program, low)[1] <= spans(program, high)[1] + len(occupancy)).all()


def one_of_each(compute: int, message: int, a: float, b: float) -> list[int]:
    program = by_hand([(0, FORWARD, 0), (0, SEND_ACTIVATION, 0), (1, FORWARD, 0)], [])
    costs = slowed(costs_of(program, [compute, message, 0]), program, a, b)
    return spans(program, costs)[1].tolist()[:2]


@given(st.integers(1, 50), st.integers(1, 50), FACTORS, FACTORS)
def test_one_transfer_beside_one_computation_is_galvatrons_formula(compute, message, a, b) -> None:
    """Both slow until one has ended, the rest at full speed."""
    overlap = min(a * compute, b * message)
    ends = np.array([overlap + compute - overlap / a, overlap + message - overlap / b])
    # The first to end does so at a whole tick, which delays the other by less than one.
    assert np.all(np.abs(one_of_each(compute, message, a, b) - ends) < 2.0)


@pytest.mark.parametrize(
    ("compute", "message", "a", "b", "ends"),
    [
        (10, 10, 1.0, 1.0, [10, 10]),
        (10, 10, 2.0, 2.0, [20, 20]),
        (10, 10, 2.0, 1.0, [15, 10]),
        (10, 10, 1.0, 2.0, [10, 15]),
        (10, 4, 1.5, 2.0, [13, 8]),
        (6, 30, 2.0, 3.0, [12, 38]),
        (10, 0, 2.0, 2.0, [10, 0]),
    ],
)
def test_one_transfer_beside_one_computation(compute, message, a, b, ends) -> None:
    assert one_of_each(compute, message, a, b) == ends


def test_a_message_disturbs_the_rank_it_goes_to() -> None:
    """Rank 0 sends 12 ticks to rank 1, which computes 4 at half the speed; 2 are through by then."""
    program = by_hand([(0, SEND_ACTIVATION, 0), (1, FORWARD, 0)], [])
    costs = replace(
        costs_of(program, [12, 4]),
        compute_slowdown=np.array([9.0, 2.0]),
        communication_slowdown=np.array([9.0, 4.0]),
    )
    assert spans(program, costs)[1].tolist() == [18, 8]


def test_a_collective_is_as_slow_as_its_slowest_member() -> None:
    """The reduction starts at 2; rank 1 computes until 14 and slows it to a half, rank 0 computes to 2."""
    rows = [(0, FORWARD, 0), (0, REDUCE, 0), (1, BACKWARD, 0), (1, REDUCE, 0)]
    program = by_hand(rows, [(0, 1, 0)], groups=((0, 1),))
    costs = replace(
        costs_of(program, [2, 10, 8, 10]),
        compute_slowdown=np.array([1.0, 2.0]),
        communication_slowdown=np.array([3.0, 2.0]),
    )
    start, end = spans(program, costs)
    assert start.tolist() == [0, 2, 0, 2]
    assert end.tolist() == [2, 18, 14, 18]


def test_a_slowed_message_leaves_the_rest_of_its_share_to_the_other() -> None:
    """Two messages of 12 ticks on one link, one of which can use a quarter of it while its rank computes."""
    program = by_hand(
        [(0, FORWARD, 0), (0, SEND_ACTIVATION, 0), (1, SEND_ACTIVATION, 0), (2, FORWARD, 0)], []
    )
    costs = replace(
        costs_of(program, [40, 12, 12, 0]),
        links=np.array([(-1, -1), (0, 1), (0, 2), (-1, -1)]),
        compute_slowdown=np.ones(3),
        communication_slowdown=np.array([4.0, 1.0, 1.0]),
    )
    assert spans(program, costs)[1].tolist() == [40, 42, 16, 0]


def test_what_starts_before_its_source_has_ended_goes_at_full_speed_until_then() -> None:
    """A backward of 10 ticks whose reduction of 8 may start 4 before its end: 4 are left, beside another of
    20 ticks, at half the speed."""
    rows = [(0, BACKWARD, 0), (0, BACKWARD, 0), (0, REDUCE, 0)]
    program = by_hand(rows, [(0, 2, 0)], groups=((0,),))
    costs = slowed(costs_of(program, [10, 20, 8]), program, 2.0, 2.0)
    start, end = spans(program, replace(costs, lead=np.array([0, 0, 4])))
    assert (start.tolist(), end.tolist()) == ([0, 10, 6], [10, 34, 18])
