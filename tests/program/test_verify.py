"""The verifier refuses every broken program and names what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from program.layouts import pipelines, training_program
from program.mutations import reorder, swap, twice, with_edge, with_value, without_edge, without_row
from program.rendezvous import stuck_rows

from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.program.checks.deadlock import check_deadlock
from weft.program.kinds import BACKWARD, FORWARD, KINDS, MESSAGES, RECEIVE_ACTIVATION, SEND_ACTIVATION, STEP
from weft.program.program import Columns, Edges, Program
from weft.program.verify import require_valid, verify

MESSAGE_KINDS = [kind for pair in MESSAGES for kind in pair]
programs = pipelines(max_devices=3).map(lambda case: training_program(*case))


def draw_row(data: st.DataObject, program: Program, *kinds: int) -> int:
    rows = np.flatnonzero(np.isin(program.columns.kind, kinds)) if kinds else np.arange(len(program))
    assume(len(rows) > 0)
    return int(data.draw(st.sampled_from(rows.tolist())))


def row_of(program: Program, rank: int, text: str) -> int:
    return next(entry.position for entry in program.of_rank(rank) if str(entry) == text)


def say(program: Program) -> str:
    return "\n".join(str(violation) for violation in verify(program))


@given(programs, st.data())
def test_any_missing_instruction_is_refused(program: Program, data: st.DataObject) -> None:
    assert verify(without_row(program, draw_row(data, program)))


@given(programs, st.data())
def test_any_missing_edge_inside_a_step_is_refused(program: Program, data: st.DataObject) -> None:
    edges = np.flatnonzero(program.edges.distance == 0)
    assume(len(edges) > 0)
    assert verify(without_edge(program, int(data.draw(st.sampled_from(edges.tolist())))))


@given(programs, st.data())
def test_any_instruction_that_occurs_twice_is_refused(program: Program, data: st.DataObject) -> None:
    assert verify(twice(program, draw_row(data, program)))


@given(programs, st.data())
def test_two_messages_of_a_channel_in_another_order_at_one_end_are_refused(
    program: Program, data: st.DataObject
) -> None:
    row = draw_row(data, program, *MESSAGE_KINDS)
    same_queue = np.flatnonzero(program.queue == program.queue[row])
    assume(len(same_queue) > 1)
    other = int(data.draw(st.sampled_from([r for r in same_queue.tolist() if r != row])))
    assert verify(swap(program, row, other))


@given(programs, st.data())
def test_changed_bytes_are_refused(program: Program, data: st.DataObject) -> None:
    row = draw_row(data, program, *MESSAGE_KINDS, REDUCE)
    assert verify(with_value(program, "bytes", row, int(program.columns.bytes[row]) + 1))


@given(programs, st.data())
def test_an_instruction_on_another_rank_is_refused(program: Program, data: st.DataObject) -> None:
    row = draw_row(data, program)
    rank = data.draw(st.integers(0, program.ranks - 1))
    assume(rank != program.columns.rank[row])
    assert verify(with_value(program, "rank", row, rank))


@given(programs, st.sampled_from(["kind", "stage", "replica", "iteration", "group"]), st.data())
def test_a_changed_coordinate_is_refused(program: Program, column: str, data: st.DataObject) -> None:
    row = draw_row(data, program)
    value = data.draw(st.integers(-2, len(KINDS)))
    assume(value != getattr(program.columns, column)[row])
    assert verify(with_value(program, column, row, value))


@given(programs, st.sampled_from(["micro_batch", "peer", "part"]), st.data())
def test_a_changed_message_is_refused(program: Program, column: str, data: st.DataObject) -> None:
    row = draw_row(data, program, *MESSAGE_KINDS)
    value = data.draw(st.integers(-2, 12))
    assume(value != getattr(program.columns, column)[row])
    assert verify(with_value(program, column, row, value))


@given(programs, st.sampled_from([FORWARD, BACKWARD]), st.data())
def test_a_changed_micro_batch_is_refused(program: Program, kind: int, data: st.DataObject) -> None:
    row = draw_row(data, program, kind)
    value = data.draw(st.integers(-2, 20))
    assume(value != program.columns.micro_batch[row])
    assert verify(with_value(program, "micro_batch", row, value))


@settings(max_examples=150)
@given(pipelines(max_devices=3), st.data())
def test_the_proof_of_no_deadlock_agrees_with_an_execution(
    case: tuple[str, int, int, tuple[int, ...], int], data: st.DataObject
) -> None:
    program = training_program(*case)
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, program.ranks - 1))
        start, end = (int(row) for row in program.rank_starts[rank : rank + 2])
        order = np.arange(len(program))
        source, target = data.draw(st.tuples(st.integers(start, end - 1), st.integers(start, end - 1)))
        moved = np.insert(np.delete(order, source), target, source)
        program = reorder(program, moved)
    assert bool(check_deadlock(program)) == bool(stuck_rows(program))


def test_a_deadlock_names_its_cycle() -> None:
    """Device 1 wants forward 1 before backward 0, device 0 backward 0 before forward 1."""
    program = training_program("1f1b", 2, 2, (2,))
    program = swap(program, row_of(program, 1, "F1.1"), row_of(program, 1, "B1.0"))
    program = swap(program, row_of(program, 0, "F0.1"), row_of(program, 0, "B0.0"))
    assert [str(problem) for problem in check_deadlock(program)] == [
        "deadlock: these wait for each other: rank 0 B0.0 -> rank 0 SF0.1 to rank 1 -> rank 1 F1.1 -> "
        "rank 1 SB1.0 to rank 0 -> rank 0 B0.0"
    ]


def test_an_edge_back_to_itself_is_a_deadlock() -> None:
    program = training_program("gpipe", 1, 1, (1,))
    assert "rank 0 F0.0 -> rank 0 F0.0" in say(with_edge(program, 0, 0))


def test_a_receive_that_its_own_send_waits_for_is_a_deadlock() -> None:
    program = training_program("gpipe", 2, 2, (1,))
    send, receive = row_of(program, 0, "SF0.0"), row_of(program, 1, "RF1.0")
    assert "deadlock" in say(with_edge(program, receive, send))


def test_reductions_in_another_order_on_one_replica_are_a_deadlock() -> None:
    program = training_program("breadth-first", 1, 2, (1, 1))
    order = np.arange(len(program))
    late = order[order != row_of(program, 0, "R1")]
    program = reorder(program, np.insert(late, row_of(program, 0, "R0"), row_of(program, 0, "R1")))
    assert "deadlock: these wait for each other:" in say(program)


def test_a_long_cycle_is_cut() -> None:
    program = training_program("gpipe", 8, 8, (1,))
    (problem,) = check_deadlock(with_edge(program, row_of(program, 7, "F7.0"), row_of(program, 0, "F0.0")))
    assert "rank 5 SF5.0 to rank 6 -> (3 more) -> rank 0 F0.0" in str(problem)


def test_messages_name_both_ranks() -> None:
    program = training_program("gpipe", 2, 2, (1,))
    assert "nothing consumes the 'message' that rank 0 SF0.0 to rank 1 makes" in say(
        without_row(program, row_of(program, 1, "RF1.0"))
    )
    assert "rank 1 RF1.0 from rank 0 reads 'message' of stage 0, which nothing makes on rank 0" in say(
        without_row(program, row_of(program, 0, "SF0.0"))
    )


def test_obligations_name_stage_micro_batch_and_rank() -> None:
    program = training_program("gpipe", 2, 2, (2,))
    assert "step: stage 1 of replica 0 runs 2 times on rank 1, not 1" in say(
        twice(program, row_of(program, 1, "O1"))
    )
    assert "forward: stage 0, micro-batch 1 of replica 0 runs 0 times on rank 0, not 1" in say(
        without_row(program, row_of(program, 0, "F0.1"))
    )


def test_a_step_must_wait_for_its_reduction() -> None:
    program = training_program("gpipe", 1, 1, (1, 1))
    edge = int(np.flatnonzero(program.columns.kind[program.edges.target] == STEP)[0])
    assert "rank 0 O0 does not wait for rank 0 R0" in say(without_edge(program, edge))


def test_the_next_forward_must_wait_for_the_step_before() -> None:
    """Two steps in one cycle; the second one's forward comes before the first one's optimizer step."""
    columns = Columns.of(
        6,
        kind=[FORWARD, BACKWARD, STEP, FORWARD, BACKWARD, STEP],
        stage=0,
        micro_batch=[0, 0, -1, 0, 0, -1],
        iteration=[0, 0, 0, 1, 1, 1],
        rank=0,
        replica=0,
    )
    single = training_program("gpipe", 1, 1, (1,))
    passes = np.array([[0, 0, 0, 0], [0, 0, 0, 1]])
    program = replace(
        single,
        steps_per_cycle=2,
        columns=columns,
        edges=Edges.of([0, 1, 3, 4], [1, 2, 4, 5]),
        obligations=replace(
            single.obligations, forward=passes, backward=passes, step=np.array([[0, 0, 0], [0, 0, 1]])
        ),
    )
    assert verify(program) == []
    early = reorder(program, np.array([0, 1, 3, 2, 4, 5]))
    assert "rank 0 F0.0 of step 1 does not wait for rank 0 O0 of step 0, which makes its 'weights'" in say(
        early
    )


def test_a_fold_is_only_a_fold_when_it_says_so() -> None:
    program = training_program("gpipe", 1, 1, (1, 1))
    mine = program.columns.replica == 0
    edges = program.edges
    inside = mine[edges.source]
    obligations = program.obligations
    folded = replace(
        program,
        columns=program.columns.take(np.flatnonzero(mine)),
        edges=Edges(
            source=edges.source[inside], target=edges.target[inside], distance=edges.distance[inside]
        ),
        obligations=replace(
            obligations,
            forward=obligations.forward[:1],
            backward=obligations.backward[:1],
            step=obligations.step[:1],
        ),
    )
    assert "not all ranks of [0, 1] take part in rank 0 R0" in say(folded)
    assert verify(replace(folded, kept_replica=0)) == []


def test_an_obligation_needs_an_owner() -> None:
    program = training_program("gpipe", 1, 1, (1,))
    orphaned = replace(program, obligations=replace(program.obligations, owners={}))
    assert "stage 0 of replica 0 is owed but no rank owns it" in say(orphaned)


def test_an_empty_program_owes_nothing() -> None:
    program = training_program("gpipe", 1, 1, (1,))
    nothing = np.zeros((0, 4), dtype=np.int64)
    empty = replace(
        program,
        columns=program.columns.take(np.zeros(0, dtype=np.int64)),
        edges=Edges.of([], []),
        obligations=replace(
            program.obligations, forward=nothing, backward=nothing, step=nothing[:, :3], owners={}
        ),
    )
    assert verify(empty) == []


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("kind", 99, "columns.kind: row 0: 99 is not 0.."),
        ("peer", 5, "columns.peer: row 0: 5 is not -1..1"),
        ("bytes", -1, "columns.bytes: row 0: -1 is not 0 or more"),
    ],
)
def test_values_out_of_range_are_named(column: str, value: int, text: str) -> None:
    assert text in say(with_value(training_program("gpipe", 2, 2, (1,)), column, 0, value))


def test_edges_out_of_range_are_named() -> None:
    program = training_program("gpipe", 1, 1, (1,))
    assert "edges.target: edge 4: 7 is not 0..2" in say(with_edge(with_edge(program, 0, 2), 0, 7))


def test_rows_must_be_sorted_by_rank() -> None:
    program = training_program("gpipe", 2, 2, (1,))
    assert "belongs to an earlier rank" in say(swap(program, 0, len(program) - 1))


def test_a_step_must_not_begin_before_the_one_before_ends() -> None:
    program = replace(training_program("gpipe", 2, 2, (1,)), steps_per_cycle=2)
    assert "comes after an instruction of a later step" in say(with_value(program, "iteration", 0, 1))


def test_a_long_list_is_counted() -> None:
    program = training_program("gpipe", 1, 1, (20,))
    empty = replace(program, edges=Edges.of([], []))
    assert "and 12 more of this kind" in say(empty)


def test_require_valid_raises_every_violation() -> None:
    program = training_program("gpipe", 2, 2, (1,))
    require_valid(program)
    broken = without_row(program, row_of(program, 1, "RF1.0"))
    with pytest.raises(InputError) as caught:
        require_valid(broken)
    assert list(caught.value.violations) == verify(broken)
    assert RECEIVE_ACTIVATION not in broken.columns.kind
    assert SEND_ACTIVATION in broken.columns.kind
