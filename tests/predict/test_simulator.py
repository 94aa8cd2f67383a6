from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict.programs import by_hand, costs_of, random_programs

from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.predict.simulator import simulate
from weft.program.build import build_training_program
from weft.program.kinds import BACKWARD, FORWARD, KINDS, RECEIVE_ACTIVATION, SEND_ACTIVATION, STEP
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule

durations = st.integers(0, 20)


def training_program(
    name: str, *, devices: int, loops: int, micro_batches: int, replicas: int = 1
) -> Program:
    stages = devices * loops
    return build_training_program(
        PipelineLayout(
            stages=tuple(
                StageLayout(
                    replicas=tuple((replica * devices + stage % devices,) for replica in range(replicas)),
                    gradient_bytes=8,
                )
                for stage in range(stages)
            ),
            micro_batches=(micro_batches,) * replicas,
            message_bytes={(stage, stage + 1): 4 for stage in range(stages - 1)},
        ),
        get_schedule(name),
        {},
    )


@st.composite
def priced_programs(draw: st.DrawFn) -> tuple[Program, np.ndarray, np.ndarray, bool]:
    program = draw(random_programs())
    many = st.lists(durations, min_size=len(program), max_size=len(program))
    return program, np.array(draw(many)), np.array(draw(many)), draw(st.booleans())


@given(priced_programs(), st.data())
def test_no_duration_can_grow_and_the_step_shrink(priced, data) -> None:
    program, occupancy, latency, synchronous = priced
    row, more = data.draw(st.integers(0, len(program) - 1)), data.draw(st.integers(1, 20))
    before = simulate(program, costs_of(program, occupancy, latency, synchronous=synchronous), max_cycles=3)
    for column in (occupancy, latency):
        grown = column.copy()
        grown[row] += more
        pair = (grown, latency) if column is occupancy else (occupancy, grown)
        after = simulate(program, costs_of(program, *pair, synchronous=synchronous), max_cycles=3)
        assert after.first_step_ticks >= before.first_step_ticks


@given(priced_programs())
@settings(max_examples=25)
def test_both_engines_agree_exactly(priced) -> None:
    program, occupancy, latency, synchronous = priced
    costs = costs_of(program, occupancy, latency, synchronous=synchronous)
    plain, compiled = (simulate(program, costs, compiled=compiled) for compiled in (False, True))
    assert (plain.step_s, plain.cycles) == (compiled.step_s, compiled.cycles)
    for name in ("posted_ns", "start_ns", "end_ns"):
        assert np.array_equal(getattr(plain.timeline, name), getattr(compiled.timeline, name))


@given(priced_programs())
def test_a_steady_cycle_is_followed_by_its_like_for_ever(priced) -> None:
    """An edge from a row to itself eight cycles later that does not bind lets the simulator look so far."""
    program, occupancy, latency, synchronous = priced
    costs = costs_of(program, occupancy, latency, synchronous=synchronous)
    usual = simulate(program, costs)
    edges = Edges.join([program.edges, Edges.of([0], [0], distance=8)])
    further = simulate(replace(program, edges=edges), costs, max_cycles=40)
    if usual.steady and occupancy[0] + latency[0] <= 8 * usual.step_s:
        assert (further.steady, further.step_s) == (True, usual.step_s)
        assert further.cycles > usual.cycles
        for name in ("posted_ns", "start_ns", "end_ns"):
            assert np.array_equal(getattr(usual.timeline, name), getattr(further.timeline, name))


@given(priced_programs())
def test_every_constraint_holds_and_none_is_slack_everywhere(priced) -> None:
    """Starts respect edges and queues; and an instruction starts at once when nothing holds it back."""
    program, occupancy, latency, _ = priced
    timeline = simulate(program, costs_of(program, occupancy, latency), max_cycles=1).timeline
    order = np.argsort(timeline.position)
    start, end = (time[order] // 10**9 for time in (timeline.start_ns, timeline.end_ns))
    start, end = start - start.min(), end - start.min()
    assert np.array_equal(end - start, occupancy)
    earliest = np.zeros(len(program), dtype=np.int64)
    edges = program.edges
    now = edges.distance == 0
    ready = end[edges.source[now]] + latency[edges.source[now]]
    np.maximum.at(earliest, edges.target[now], ready)
    for queue in np.unique(program.queue):
        rows = np.flatnonzero(program.queue == queue)
        np.maximum.at(earliest, rows[1:], end[rows[:-1]])
    assert np.array_equal(start, earliest - earliest.min())


@given(
    st.sampled_from(["gpipe", "1f1b", "breadth-first"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(durations, min_size=12, max_size=12),
    st.booleans(),
)
def test_a_pipeline_is_never_faster_than_its_slowest_rank_or_its_critical_path(
    name: str, devices: int, micro_batches: int, times: list[int], synchronous: bool
) -> None:
    program = training_program(name, devices=devices, loops=1, micro_batches=micro_batches)
    table = np.zeros(len(KINDS), dtype=np.int64)
    table[[FORWARD, BACKWARD, STEP, SEND_ACTIVATION]] = times[:4]
    occupancy = table[program.columns.kind] + np.array(times[4:])[program.columns.stage % 8]
    occupancy[program.columns.kind == RECEIVE_ACTIVATION] = 0
    simulation = simulate(program, costs_of(program, occupancy, synchronous=synchronous))
    computes = np.isin(program.columns.kind, (FORWARD, BACKWARD, STEP))
    busy = np.bincount(program.columns.rank[computes], weights=occupancy[computes])
    assert simulation.step_s >= busy.max()
    first = program.columns.micro_batch == micro_batches - 1
    path = occupancy[first & np.isin(program.columns.kind, (FORWARD, BACKWARD))].sum()
    assert simulation.first_step_s >= path
    assert simulation.steady


@given(st.integers(1, 4), st.integers(1, 8))
def test_equal_stages_and_free_links_give_the_closed_form_every_step(
    devices: int, micro_batches: int
) -> None:
    for name in ("gpipe", "1f1b"):
        program = training_program(name, devices=devices, loops=1, micro_batches=micro_batches)
        table = np.zeros(len(KINDS), dtype=np.int64)
        table[FORWARD], table[BACKWARD] = 2, 3
        simulation = simulate(program, costs_of(program, table[program.columns.kind]))
        assert simulation.first_step_s == simulation.step_s == (micro_batches + devices - 1) * 5
        assert simulation.timeline.end_ns.max() == simulation.step_s * 10**9


def test_a_collective_starts_when_its_last_member_is_ready_and_ends_together() -> None:
    rows = [(0, FORWARD, 0), (0, REDUCE, 0), (1, FORWARD, 0), (1, REDUCE, 0)]
    program = by_hand(rows, [(0, 1, 0), (2, 3, 0)], groups=((0, 1),))
    timeline = simulate(program, costs_of(program, [3, 4, 8, 5]), max_cycles=1).timeline
    assert timeline.start_ns.tolist() == [0, 8 * 10**9, 0, 8 * 10**9]
    assert timeline.end_ns.tolist() == [3 * 10**9, 13 * 10**9, 8 * 10**9, 13 * 10**9]


def test_a_folded_program_holds_only_one_member_of_a_collective() -> None:
    program = by_hand([(0, FORWARD, 0), (0, REDUCE, 0)], [(0, 1, 0)], groups=((0, 7),))
    assert simulate(program, costs_of(program, [3, 4]), max_cycles=1).first_step_s == 7


def test_replicas_step_as_one_pipeline_does_when_reductions_are_free() -> None:
    alone, both = (
        training_program("1f1b", devices=2, loops=1, micro_batches=3, replicas=replicas)
        for replicas in (1, 2)
    )
    steps = []
    for program in (alone, both):
        computes = np.isin(program.columns.kind, (FORWARD, BACKWARD))
        steps.append(simulate(program, costs_of(program, computes * 2)).step_s)
    assert steps[0] == steps[1]


def test_a_synchronous_rank_posts_nothing_while_it_computes() -> None:
    """Rank 0 issues a send that needs nothing after a computation of 5 ticks."""
    program = by_hand([(0, FORWARD, 0), (0, SEND_ACTIVATION, 0), (0, FORWARD, 1)], [])
    for synchronous, start in ((False, 0), (True, 5)):
        timeline = simulate(
            program, costs_of(program, [5, 1, 2], synchronous=synchronous), max_cycles=1
        ).timeline
        assert timeline.start_ns.tolist() == [0, start * 10**9, 5 * 10**9]
        assert timeline.posted_ns.tolist() == [0, start * 10**9, start * 10**9]


def test_a_synchronous_rank_waits_over_the_border_of_a_cycle() -> None:
    program = by_hand([(0, SEND_ACTIVATION, 0), (0, FORWARD, 0)], [])
    costs = costs_of(program, [1, 5], synchronous=True)
    simulation = simulate(program, costs)
    assert simulation.step_s == 5
    assert simulation.timeline.start_ns.tolist() == [0, 0]
    assert simulate(program, replace(costs, synchronous=np.array([False]))).cycles == 16


def test_latency_delays_dependents_but_not_the_queue() -> None:
    rows = [(0, SEND_ACTIVATION, 0), (0, SEND_ACTIVATION, 1), (1, FORWARD, 0)]
    program = by_hand(rows, [(0, 2, 0)])
    timeline = simulate(program, costs_of(program, [2, 2, 1], [10, 0, 0]), max_cycles=1).timeline
    assert timeline.start_ns.tolist() == [0, 2 * 10**9, 12 * 10**9]


def test_edges_to_later_cycles_hold_back_and_the_period_shows_it() -> None:
    """One computation of 2 ticks that may only start 9 ticks after its twin of two cycles earlier."""
    program = by_hand([(0, FORWARD, 0), (0, SEND_ACTIVATION, 0)], [(0, 1, 0), (1, 0, 2)])
    simulation = simulate(program, costs_of(program, [2, 3], [0, 4]), max_cycles=40)
    assert simulation.first_step_s == 5
    assert simulation.step_s == pytest.approx(4.5, rel=0.03)


def test_a_prologue_runs_once() -> None:
    rows = [(0, FORWARD, 0), (0, FORWARD, 1), (0, SEND_ACTIVATION, 1)]
    program = by_hand(rows, [(0, 2, 0), (1, 2, 0)], iteration=[-1, 0, 0])
    simulation = simulate(program, costs_of(program, [7, 2, 1]))
    assert (simulation.first_step_s, simulation.step_s, simulation.steady) == (10, 2, True)


def test_a_cycle_of_two_steps_counts_as_two() -> None:
    program = by_hand([(0, FORWARD, 0), (0, FORWARD, 1)], [], iteration=[0, 1], steps_per_cycle=2)
    simulation = simulate(program, costs_of(program, [2, 4]))
    assert (simulation.first_step_s, simulation.step_s) == (2, 3)
    assert simulation.timeline.step.tolist() == [0, 1]


def test_ranks_that_never_agree_are_said_to() -> None:
    program = by_hand([(0, FORWARD, 0), (1, FORWARD, 0)], [])
    simulation = simulate(program, costs_of(program, [2, 5]), max_cycles=4)
    assert (simulation.steady, simulation.cycles, simulation.step_s) == (False, 4, 5)


def test_a_circle_is_refused_and_named() -> None:
    rows = [(0, FORWARD, 0), (0, FORWARD, 1), (1, FORWARD, 2), (1, FORWARD, 3)]
    # Rank 0 waits for rank 1's second instruction, whose queue waits for rank 0's second.
    program = by_hand(rows, [(3, 0, 0), (1, 2, 0)])
    with pytest.raises(InputError) as refused:
        simulate(program, costs_of(program, 1))
    text = str(refused.value)
    assert all(word in text for word in ("rank 0 F0.0", "rank 0 F1.1", "rank 1 F2.2", "rank 1 F3.3"))


def test_a_collective_whose_members_meet_in_opposite_orders_is_refused() -> None:
    rows = [(0, REDUCE, 0), (0, REDUCE, 1), (1, REDUCE, 1), (1, REDUCE, 0)]
    program = by_hand(rows, [], groups=((0, 1),))
    for compiled in (False, True):
        with pytest.raises(InputError, match="wait for each other"):
            simulate(program, costs_of(program, 1), compiled=compiled)


def test_simulations_repeat_exactly() -> None:
    program = training_program("breadth-first", devices=3, loops=2, micro_batches=4, replicas=2)
    costs = costs_of(program, np.arange(len(program)) % 7, np.arange(len(program)) % 3)
    first, second = simulate(program, costs), simulate(program, costs)
    assert np.array_equal(first.timeline.end_ns, second.timeline.end_ns)
    assert np.array_equal(first.timeline.id, program.ids[first.timeline.position])
    assert first.peak_positions.tolist() == second.peak_positions.tolist()


@pytest.mark.parametrize(("name", "held"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])])
def test_peaks_count_what_the_order_keeps(name: str, held: list[int]) -> None:
    program = training_program(name, devices=3, loops=1, micro_batches=6)
    kind = program.columns.kind
    change = 10 * (kind == FORWARD).astype(np.int64) - 10 * (kind == BACKWARD)
    occupancy = np.where(kind == FORWARD, 1, np.where(kind == BACKWARD, 2, 0))
    simulation = simulate(program, costs_of(program, occupancy, live_bytes=change, base_bytes=5))
    assert simulation.peak_bytes.tolist() == [5 + 10 * count for count in held]
    for rank, row in enumerate(simulation.peak_positions.tolist()):
        assert (program.columns.rank[row], kind[row]) == (rank, FORWARD)
