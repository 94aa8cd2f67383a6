"""Sharding adds the gathers and reductions of the buffer rule and leaves the computations alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import COLLECTIVES, asked, pipelines, schedule_layout, sharded_program, training_program
from program.mutations import twice, without_edge, without_row
from program.rendezvous import stuck_rows

from weft.errors import InputError
from weft.methods.sharding.kinds import FREE, GATHER, REDUCE
from weft.program.buffers import SHARDED_BUFFERS, gathers, reductions
from weft.program.build import build_evaluation_program, program_orders
from weft.program.kinds import BACKWARD, BACKWARD_WEIGHT, COMPUTATIONS, FORWARD, MESSAGES, STEP
from weft.program.program import Program
from weft.program.schedules.base import ComputeOrder
from weft.program.verify import verify

LEVELS = ("zero-0", "zero-1", "zero-2", "zero-3")
Case = tuple[str, int, int, tuple[int, ...], int]


def replicated(case: Case) -> Case:
    """The case with at least two replicas."""
    name, devices, stages, micro_batches, lanes = case
    return name, devices, stages, (*micro_batches, micro_batches[0])[:3], lanes


cases = pipelines().map(replicated)
small = pipelines(max_devices=3).map(replicated)


def orders_of(program: Program) -> list[ComputeOrder]:
    return program_orders(program)


def count(program: Program, rank: int, kind: int) -> int:
    columns = program.columns
    return int(((columns.rank == rank) & (columns.kind == kind)).sum())


@given(cases, st.sampled_from(LEVELS))
def test_every_sharded_program_is_proved_and_runs_to_its_end(case: Case, level: str) -> None:
    program = sharded_program(case, level)
    assert verify(program) == []
    assert not stuck_rows(program)


@given(cases)
def test_the_computations_and_their_ids_are_those_of_the_unsharded_program(case: Case) -> None:
    name, devices, stages, micro_batches, lanes = case
    case = (name, devices, stages, micro_batches[:1] * 2, lanes)
    plain = training_program(*case)
    computes = np.isin(plain.columns.kind, COMPUTATIONS)
    for level in LEVELS[1:]:
        sharded = sharded_program(case, level)
        mine = np.isin(sharded.columns.kind, COMPUTATIONS)
        assert sharded.ids[mine].tolist() == plain.ids[computes].tolist()


@given(cases)
def test_full_sharding_gathers_and_reduces_by_the_buffer_rule(case: Case) -> None:
    program = sharded_program(case, "zero-3")
    for rank, order in enumerate(orders_of(program)):
        expected = len(gathers(order, SHARDED_BUFFERS))
        assert count(program, rank, GATHER) == count(program, rank, FREE) == expected
        assert count(program, rank, REDUCE) == len(reductions(order, SHARDED_BUFFERS))


@given(cases)
def test_what_keeps_its_buffer_is_gathered_and_reduced_once(case: Case) -> None:
    for level in LEVELS[:2]:
        program = sharded_program(case, level)
        for rank, order in enumerate(orders_of(program)):
            stages = len(set(order.stage.tolist()))
            assert count(program, rank, REDUCE) == stages
            assert count(program, rank, GATHER) == (stages if level == "zero-1" else 0)
            assert count(program, rank, FREE) == 0


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "loops", "gathered", "reduced"),
    [
        ("breadth-first", 4, 8, 4, 6, 4),
        ("depth-first", 4, 8, 4, 20, 8),
        ("breadth-first", 4, 16, 4, 6, 4),
        ("depth-first", 4, 16, 4, 44, 16),
        ("breadth-first", 4, 32, 8, 14, 8),
        ("depth-first", 4, 32, 8, 268, 64),
    ],
)
def test_golden_counts_of_the_first_rank(
    name: str, devices: int, micro_batches: int, loops: int, gathered: int, reduced: int
) -> None:
    program = training_program(name, devices, devices * loops, (micro_batches,) * 2, sharding="zero-3")
    assert count(program, 0, GATHER) == gathered
    assert count(program, 0, REDUCE) == reduced


@given(cases, st.sampled_from(LEVELS))
def test_no_gradient_is_made_after_its_last_reduction(case: Case, level: str) -> None:
    program = sharded_program(case, level)
    columns = program.columns
    for row in np.flatnonzero(np.isin(columns.kind, (BACKWARD, BACKWARD_WEIGHT))).tolist():
        later = (
            (columns.kind == REDUCE)
            & (columns.rank == columns.rank[row])
            & (columns.stage == columns.stage[row])
            & (np.arange(len(program)) > row)
        )
        assert later.any()


@given(cases)
def test_the_bytes_reduced_do_not_depend_on_the_level_or_the_order_while_gradients_keep_their_buffers(
    case: Case,
) -> None:
    _, _, stages, _, lanes = case
    expected = sum(1000 + stage for stage in range(stages)) * lanes * schedule_layout(*case).replicas
    for level in LEVELS[:2]:
        program = sharded_program(case, level)
        assert int(program.columns.bytes[program.columns.kind == REDUCE].sum()) == expected


@given(cases)
def test_gathers_precede_reductions_that_become_possible_at_the_same_place(case: Case) -> None:
    program = sharded_program(case, "zero-3")
    columns = program.columns
    collective = np.isin(columns.kind, COLLECTIVES)
    free_or_send = np.isin(columns.kind, (FREE, *(send for send, _ in MESSAGES)))
    place = np.cumsum(~collective & ~free_or_send)
    for one, two in zip(
        *(np.flatnonzero(collective)[part] for part in (slice(-1), slice(1, None))), strict=True
    ):
        if place[one] == place[two] and columns.rank[one] == columns.rank[two]:
            assert not (columns.kind[one] == REDUCE and columns.kind[two] == GATHER)


@given(cases, st.sampled_from(LEVELS[1:]))
def test_the_first_gather_is_issued_before_anything_else(case: Case, level: str) -> None:
    program = sharded_program(case, level)
    for start, end in zip(program.rank_starts, program.rank_starts[1:], strict=False):
        if end > start:
            assert program.columns.kind[start] == GATHER


@given(cases, st.sampled_from(LEVELS[1:]))
def test_evaluation_reads_gathered_weights_too(case: Case, level: str) -> None:
    name, devices, stages, micro_batches, lanes = case
    layout = schedule_layout(name, devices, stages, micro_batches, lanes)
    program = build_evaluation_program(layout, methods=asked(level))
    assert verify(program) == []
    kinds = Counter(program.columns.kind.tolist())
    assert kinds[GATHER] >= stages * lanes * len(micro_batches)
    assert not kinds[REDUCE]
    assert not kinds[STEP]


@given(small, st.sampled_from(LEVELS[1:]), st.data())
def test_any_collective_or_free_that_is_missing_or_occurs_twice_is_refused(
    case: Case, level: str, data: st.DataObject
) -> None:
    program = sharded_program(case, level)
    rows = np.flatnonzero(np.isin(program.columns.kind, (*COLLECTIVES, FREE)))
    row = int(data.draw(st.sampled_from(rows.tolist())))
    assert verify(without_row(program, row))
    assert verify(twice(program, row))


@given(small, st.sampled_from(LEVELS[1:]), st.data())
def test_any_missing_edge_of_a_collective_or_free_is_refused(
    case: Case, level: str, data: st.DataObject
) -> None:
    program = sharded_program(case, level)
    kind, edges = program.columns.kind, program.edges
    chosen = (*COLLECTIVES, FREE)
    touching = np.flatnonzero(np.isin(kind[edges.source], chosen) | np.isin(kind[edges.target], chosen))
    edge = int(data.draw(st.sampled_from(touching.tolist())))
    assert verify(without_edge(program, edge))


def test_a_missing_handover_of_a_gradient_buffer_is_named() -> None:
    program = training_program("breadth-first", 2, 6, (2, 2), sharding="zero-2")
    kind, edges = program.columns.kind, program.edges
    handover = np.flatnonzero((kind[edges.source] == REDUCE) & (kind[edges.target] == BACKWARD))
    assert len(handover)
    text = "\n".join(str(problem) for problem in verify(without_edge(program, int(handover[0]))))
    assert "finds all 2 buffers taken" in text


def test_a_read_of_weights_that_were_not_gathered_is_named() -> None:
    program = training_program("1f1b", 2, 2, (2, 2), sharding="zero-1")
    gather = int(np.flatnonzero(program.columns.kind == GATHER)[0])
    text = "\n".join(str(problem) for problem in verify(without_row(program, gather)))
    assert "rank 0 F0.0 reads 'gathered_weights', which nothing makes on rank 0" in text


def test_one_replica_has_nothing_to_share_out() -> None:
    plain = training_program("breadth-first", 2, 4, (3,))
    sharded = training_program("breadth-first", 2, 4, (3,), sharding="zero-3")
    assert sharded.columns.kind.tolist() == plain.columns.kind.tolist()
    assert FORWARD in sharded.columns.kind


@pytest.mark.parametrize("level", ["zero-2", "zero-3"])
def test_unequal_shares_need_an_order_that_gathers_and_reduces_alike(level: str) -> None:
    assert verify(training_program("breadth-first", 2, 8, (4, 2), sharding=level)) == []
    with pytest.raises(InputError, match=r"\(4, 2 micro-batches\); equal shares or zero-1"):
        training_program("depth-first", 2, 8, (4, 2), sharding=level)
    assert verify(training_program("depth-first", 2, 8, (4, 2), sharding="zero-1")) == []
