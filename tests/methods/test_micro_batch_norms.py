"""Laws: every rank that trains tells what it saw once, of all micro-batches, and no step waits for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, schedule_layout

from weft.describe.plan import MICRO_BATCH_NORMS as NAME
from weft.errors import InputError
from weft.methods.micro_batch_norms.kinds import MICRO_BATCH_NORMS
from weft.methods.micro_batch_norms.program import SQUARE_BYTES
from weft.methods.tying.program import TiedWeights
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.kinds import STEP
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule
from weft.program.verify import require_valid, verify

ORDERS = (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2), ("zb-v", 2), ("gpipe", 1))


def built(
    order: tuple[str, int],
    devices: int,
    pipelines: int = 1,
    *,
    sharding: str = "zero-0",
    norm: bool = False,
    told: bool = True,
    frozen: int = 0,
) -> Program:
    schedule, loops = order
    layout = schedule_layout(
        schedule, devices, devices * loops, (2 * devices,) * pipelines, 2, frozen_stages=frozen
    )
    methods = asked(sharding, norm=norm, told=told)
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


def rows_of(program: Program) -> np.ndarray:
    return np.flatnonzero(program.columns.kind == MICRO_BATCH_NORMS)


@given(
    order=st.sampled_from(ORDERS),
    devices=st.sampled_from([2, 4]),
    pipelines=st.integers(1, 3),
    norm=st.booleans(),
    sharding=st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]),
)
def test_every_rank_tells_once_and_no_step_waits(
    order: tuple[str, int], devices: int, pipelines: int, norm: bool, sharding: str
) -> None:
    program = built(order, devices, pipelines, sharding=sharding, norm=norm)
    require_valid(program)
    columns, rows = program.columns, rows_of(program)
    assert columns.rank[rows].tolist() == list(range(program.ranks))
    assert set(columns.bytes[rows].tolist()) == {SQUARE_BYTES * 2 * devices * pipelines}
    assert {program.groups[group] for group in columns.group[rows].tolist()} == {tuple(range(program.ranks))}
    assert not np.isin(program.edges.source, rows).any()
    for rank in range(program.ranks):
        mine = np.flatnonzero(columns.rank == rank)
        first_step = mine[columns.kind[mine] == STEP][0]
        assert columns.kind[first_step - 1] == MICRO_BATCH_NORMS


def test_nothing_else_of_a_program_changes() -> None:
    told, plain = (built(("zb-h1", 1), 4, 2, norm=True, told=one) for one in (True, False))
    kept = told.columns.kind != MICRO_BATCH_NORMS
    assert np.array_equal(told.ids[kept], plain.ids)
    assert told.groups[:-1] == plain.groups
    assert told.obligations.methods.keys() - plain.obligations.methods.keys() == {NAME}


def test_ranks_whose_stages_are_frozen_take_no_part() -> None:
    program = built(("1f1b", 1), 4, frozen=2)
    require_valid(program)
    assert program.columns.rank[rows_of(program)].tolist() == [4, 5, 6, 7]


def test_an_evaluation_tells_none() -> None:
    program = build_evaluation_program(schedule_layout("1f1b", 2, 2, (4,)))
    assert not len(rows_of(program))


def test_a_dropped_edge_is_refused() -> None:
    program = built(("1f1b", 1), 2, 2)
    own = np.flatnonzero(np.isin(program.edges.target, rows_of(program)))
    assert len(own) == program.ranks
    for dropped in own.tolist():
        kept = np.arange(len(program.edges)) != dropped
        ends = (program.edges.source[kept], program.edges.target[kept])
        without = Edges(source=ends[0], target=ends[1], distance=program.edges.distance[kept])
        problems = [str(one) for one in verify(replace(program, edges=without))]
        assert any("does not wait for" in one and "'gradient_squares'" in one for one in problems)


def test_a_program_that_owes_norms_and_tells_none_is_refused() -> None:
    told, plain = (built(("1f1b", 1), 2, told=one) for one in (True, False))
    owing = replace(plain, obligations=told.obligations)
    assert any("'gradient_squares'" in str(one) for one in verify(owing))


def test_norms_that_nobody_owes_are_refused() -> None:
    program = built(("1f1b", 1), 2)
    lighter = replace(program, obligations=replace(program.obligations, methods={}))
    assert any("'gradient_squares'" in str(one) for one in verify(lighter))


@pytest.mark.parametrize("column", ["stage", "rank", "bytes", "group"])
def test_a_wrong_coordinate_is_refused(column: str) -> None:
    program = built(("1f1b", 1), 2)
    values = getattr(program.columns, column).copy()
    row = rows_of(program)[0]
    values[row] = {"stage": 9, "rank": 1, "bytes": 8, "group": 0}[column]
    assert verify(replace(program, columns=replace(program.columns, **{column: values})))


def test_copies_of_a_weight_are_refused() -> None:
    layout = schedule_layout("1f1b", 2, 2, (4,))
    methods = asked(told=True, tied=[TiedWeights((0, 1), 96)])
    with pytest.raises(InputError, match="stages with copies of one weight see parts of its gradient"):
        build_training_program(layout, get_schedule("1f1b"), {}, methods=methods)


@pytest.mark.parametrize("number", range(2))
def test_a_doubled_row_is_refused(number: int) -> None:
    program = built(("1f1b", 1), 2)
    twice = rows_of(program)[number]
    order = np.insert(np.arange(len(program)), twice, twice)
    # Everything behind moves by one; the second of the two rows keeps the edges.
    moved = np.arange(len(program)) + (np.arange(len(program)) >= twice)
    edges = program.edges
    shifted = Edges(source=moved[edges.source], target=moved[edges.target], distance=edges.distance)
    doubled = replace(program, columns=program.columns.take(order), edges=shifted)
    assert len(verify(program)) == 0 < len(verify(doubled))
