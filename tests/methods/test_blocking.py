"""Communication that is not overlapped: what it moves, what it forbids and that it never gains time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import costs_of
from program.layouts import training_program

from weft.describe.plan import Blocking, Sharding
from weft.methods.sharding.kinds import GATHER, REDUCE
from weft.predict.simulator import Simulation, simulate
from weft.program.kinds import BACKWARD, COMPUTATIONS, FORWARD, MESSAGES, STEP
from weft.program.program import Program
from weft.program.verify import verify

SENDS, RECEIVES = (list(kinds) for kinds in zip(*MESSAGES, strict=True))

# Orders that alternate, or have one stage per device, can exchange in turn; looped orders that run all
# forwards first wait for themselves.
alternating = st.sampled_from(
    [("gpipe", 1), ("1f1b", 1), ("depth-first", 1), ("depth-first", 2), ("depth-first", 3)]
)


def step_of(
    program: Program, forward: int, backward: int, hop: int, reduction: int, gather: int = 0
) -> Simulation:
    """One isolated step."""
    kind = program.columns.kind
    occupancy = np.zeros(len(program), dtype=np.int64)
    for code, ticks in ((FORWARD, forward), (BACKWARD, backward), (REDUCE, reduction), (GATHER, gather)):
        occupancy[kind == code] = ticks
    occupancy[np.isin(kind, SENDS)] = hop
    costs = replace(costs_of(program, occupancy), synchronous=np.zeros(program.ranks, dtype=np.bool_))
    return simulate(program, costs, max_cycles=1)


def makespan(program: Program, forward: int, backward: int, hop: int, reduction: int) -> int:
    """Ticks of one isolated step."""
    return step_of(program, forward, backward, hop, reduction).first_step_ticks


def pairs_of(program: Program) -> set[tuple[int, int]]:
    """What waits for what in the same step."""
    now = program.edges.distance == 0
    return set(zip(program.edges.source[now].tolist(), program.edges.target[now].tolist(), strict=True))


@given(alternating, st.integers(2, 4), st.integers(1, 3))
def test_a_message_leaves_when_its_receiver_has_come_to_it(
    order: tuple[str, int], devices: int, rounds: int
) -> None:
    name, loops = order
    program = training_program(name, devices, devices * loops, (devices * rounds,), blocking=("messages",))
    kind, rank, waits = program.columns.kind, program.columns.rank, pairs_of(program)
    flown = [(send, to) for send, to in waits if kind[send] in SENDS and kind[to] in RECEIVES]
    assert flown
    for send, receive in flown:
        before = np.flatnonzero((rank == rank[receive]) & np.isin(kind, COMPUTATIONS))
        before = before[before < receive]
        assert not len(before) or (int(before[-1]), send) in waits


@given(alternating, st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_orders_that_alternate_can_exchange_in_turn(
    order: tuple[str, int], devices: int, rounds: int, replicas: int
) -> None:
    name, loops = order
    micro_batches = (devices * rounds,) * replicas
    for blocking in (("messages",), ("reductions",), ("messages", "reductions")):
        program = training_program(name, devices, devices * loops, micro_batches, blocking=blocking)
        assert verify(program) == []


@given(
    alternating,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(0, 40),
)
def test_blocking_never_gains_time(
    order: tuple[str, int], devices: int, rounds: int, forward: int, backward: int, hop: int, reduction: int
) -> None:
    name, loops = order
    micro_batches = (devices * rounds,) * 2

    def ticks(*blocking: str) -> int:
        program = training_program(name, devices, devices * loops, micro_batches, blocking=blocking)
        return makespan(program, forward, backward, hop, reduction)

    overlapped = ticks()
    assert overlapped <= ticks("messages") <= ticks("messages", "reductions")
    assert overlapped <= ticks("reductions") <= ticks("messages", "reductions")


@given(
    st.sampled_from(["1f1b", "breadth-first", "hybrid"]),
    st.integers(1, 2),
    st.integers(1, 4),
    st.sampled_from(["zero-1", "zero-2", "zero-3"]),
    st.sampled_from([("gathers",), ("reductions",), ("gathers", "reductions")]),
    st.tuples(*[st.integers(1, 9)] * 4),
)
def test_a_device_does_not_compute_while_it_waits_for_its_replicas(
    name: str, devices: int, loops: int, level: Sharding, words: tuple[Blocking, ...], ticks: tuple[int, ...]
) -> None:
    loops = 1 if name == "1f1b" else loops
    shape = (name, devices, devices * loops, (2 * devices,) * 2)
    program = training_program(*shape, sharding=level, blocking=words)
    assert verify(program) == []
    forward, backward, reduction, gather = ticks
    step = step_of(program, forward, backward, 1, reduction, gather)
    kinds = [code for word, code in (("gathers", GATHER), ("reductions", REDUCE)) if word in words]
    timeline = step.timeline
    waits, computes = (np.isin(timeline.kind, codes) for codes in (kinds, COMPUTATIONS))
    assert waits.any()
    for rank in range(program.ranks):
        here = timeline.rank == rank
        for row in np.flatnonzero(here & waits).tolist():
            others = here & computes & (timeline.end_ns > timeline.start_ns[row])
            assert not (others & (timeline.start_ns < timeline.end_ns[row])).any()
    plain = step_of(training_program(*shape, sharding=level), forward, backward, 1, reduction, gather)
    assert plain.first_step_ticks <= step.first_step_ticks


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(2, 4), st.integers(1, 3))
def test_free_messages_of_one_stage_per_device_cost_nothing_to_wait_for(
    name: str, devices: int, rounds: int
) -> None:
    plain = training_program(name, devices, devices, (devices * rounds,))
    blocking = training_program(name, devices, devices, (devices * rounds,), blocking=("messages",))
    assert makespan(plain, 2, 4, 0, 0) == makespan(blocking, 2, 4, 0, 0)


def test_two_devices_pay_every_message_in_full() -> None:
    """1F1B on two devices, two micro-batches: by hand, with a message as long as a forward."""
    plain = training_program("1f1b", 2, 2, (2,))
    blocking = training_program("1f1b", 2, 2, (2,), blocking=("messages",))
    # Device 0: F0 0-2, F1 2-4; device 1: F0 3-5, B0 5-9, F1 9-11, B1 11-15; device 0: B1 16-20.
    assert makespan(plain, 2, 4, 1, 0) == 20
    # The exchange for F1 begins when device 1 has ended B0, and carries its gradient too: device 0 F1 3-5
    # waits until 9, goes on with B0 at 10; device 1 F1 10-12, B1 12-16; device 0 B1 17-21.
    assert makespan(blocking, 2, 4, 1, 0) == 21


@given(alternating, st.integers(1, 3), st.integers(1, 2))
def test_reductions_at_the_end_follow_every_backward_and_precede_every_step(
    order: tuple[str, int], devices: int, rounds: int
) -> None:
    name, loops = order
    program = training_program(
        name, devices, devices * loops, (devices * rounds,) * 2, blocking=("reductions",)
    )
    columns, waits = program.columns, pairs_of(program)
    for rank in range(program.ranks):
        kind = columns.kind[columns.rank == rank]
        last = int(np.flatnonzero(np.isin(kind, COMPUTATIONS))[-1])
        reduces = np.flatnonzero(kind == REDUCE)
        assert len(reduces) == loops
        assert last < reduces.min()
        first = int(program.rank_starts[rank])
        assert {(first + last, first + row) for row in reduces.tolist()} <= waits
        assert reduces.max() < np.flatnonzero(kind == STEP).min()


@pytest.mark.parametrize("name", ["breadth-first", "hybrid"])
def test_orders_that_run_ahead_would_wait_for_themselves(name: str) -> None:
    program = training_program(name, 4, 8, (8,), blocking=("messages",))
    assert any(problem.where == "deadlock" for problem in verify(program))


def test_sends_of_a_pair_leave_together() -> None:
    """Depth-first exchanges once for a forward and the backward that follows it."""
    program = training_program("depth-first", 2, 4, (4,), blocking=("messages",))
    columns = program.columns
    mine = columns.kind[columns.rank == 0].tolist()
    pairs = [place for place in range(len(mine) - 1) if mine[place : place + 2] == [FORWARD, BACKWARD]]
    assert len(pairs) >= 2
