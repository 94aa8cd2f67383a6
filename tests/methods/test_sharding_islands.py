"""In islands every gradient is added up inside its island, then once across them, before its step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import COLLECTIVES, asked, pipelines, schedule_layout, training_program
from program.mutations import twice, without_edge, without_row
from program.rendezvous import stuck_rows

from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.methods.gradient_norm.kinds import NORM
from weft.methods.sharding.kinds import FREE, GATHER, REDUCE, REDUCE_ACROSS
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.kinds import MAKES_GRADIENTS, STEP
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.verify import verify

LEVELS: tuple[Sharding, ...] = ("zero-1", "zero-2", "zero-3")
Case = tuple[str, int, int, tuple[int, ...], int, int, Sharding]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Schedule, devices, stages, equal shares of two or three islands, lanes, island, level."""
    name, devices, stages, micro_batches, lanes = draw(pipelines(max_devices=3))
    island, islands = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    return name, devices, stages, micro_batches[:1] * (island * islands), lanes, island, draw(levels)


levels = st.sampled_from(LEVELS)


def program_of(case: Case, *, gradient_norm: bool = False) -> Program:
    name, devices, stages, micro_batches, lanes, island, sharding = case
    layout = schedule_layout(name, devices, stages, micro_batches, lanes)
    return build_training_program(
        layout, get_schedule(name), {}, methods=asked(sharding, island=island, norm=gradient_norm)
    )


def four_replicas(sharding: Sharding = "zero-1") -> Program:
    """Ranks 0 and 1, and 2 and 3, are islands."""
    return program_of(("gpipe", 1, 1, (2,) * 4, 1, 2, sharding))


@given(cases(), st.booleans())
def test_every_program_of_islands_is_proved_and_runs_to_its_end(case: Case, gradient_norm: bool) -> None:
    program = program_of(case, gradient_norm=gradient_norm)
    assert verify(program) == []
    assert not stuck_rows(program)


@given(cases())
def test_each_step_follows_one_sum_over_islands_of_the_share_that_it_steps(case: Case) -> None:
    program, island = program_of(case), case[5]
    columns, edges = program.columns, program.edges
    across = columns.kind == REDUCE_ACROSS
    assert across.sum() == (columns.kind == STEP).sum()
    assert np.array_equal(columns.bytes[across], -(-(1000 + columns.stage[across]) // island))
    later = columns.kind[edges.target[np.isin(edges.source, np.flatnonzero(across))]]
    assert set(later.tolist()) == {STEP}
    inside = np.isin(columns.kind, (GATHER, REDUCE))
    sizes = np.array([len(group) for group in program.groups])
    assert set(sizes[columns.group[inside]].tolist()) == {island}


@settings(max_examples=30)
@given(cases())
def test_islands_change_nothing_else(case: Case) -> None:
    name, devices, stages, micro_batches, lanes, _, sharding = case
    plain = training_program(name, devices, stages, micro_batches, lanes, sharding=sharding)
    program = program_of(case)
    others = program.columns.kind != REDUCE_ACROSS
    assert program.ids[others].tolist() == plain.ids.tolist()


@pytest.mark.parametrize("sharding", LEVELS)
@pytest.mark.parametrize("schedule", ["breadth-first", "chimera"])
def test_one_island_is_the_program_without_islands(schedule: str, sharding: Sharding) -> None:
    stages = 2 if schedule == "chimera" else 4
    plain = training_program(schedule, 2, stages, (4, 4), sharding=sharding)
    one = program_of((schedule, 2, stages, (4, 4), 1, 4 if schedule == "chimera" else 2, sharding))
    assert one.groups == plain.groups
    assert one.obligations.methods == plain.obligations.methods
    assert one.ids.tolist() == plain.ids.tolist()
    assert one.columns.group.tolist() == plain.columns.group.tolist()


@given(cases(), st.booleans(), st.data())
def test_any_collective_that_is_missing_or_occurs_twice_is_refused(
    case: Case, gradient_norm: bool, data: st.DataObject
) -> None:
    program = program_of(case, gradient_norm=gradient_norm)
    rows = np.flatnonzero(np.isin(program.columns.kind, (*COLLECTIVES, NORM)))
    row = int(data.draw(st.sampled_from(rows.tolist())))
    assert verify(without_row(program, row))
    assert verify(twice(program, row))


@given(cases(), st.data())
def test_any_missing_edge_of_a_collective_is_refused(case: Case, data: st.DataObject) -> None:
    program = program_of(case, gradient_norm=True)
    kind, edges = program.columns.kind, program.edges
    chosen = (*COLLECTIVES, FREE, NORM)
    touching = np.isin(kind[edges.source], chosen) | np.isin(kind[edges.target], chosen)
    # The norm waits for the last computations, too, which the reductions it waits for imply.
    touching &= ~(np.isin(kind[edges.source], MAKES_GRADIENTS) & (kind[edges.target] == NORM))
    edge = int(data.draw(st.sampled_from(np.flatnonzero(touching).tolist())))
    assert verify(without_edge(program, edge))


def text_of(program: Program) -> str:
    return "\n".join(str(problem) for problem in verify(program))


def only(program: Program, *kinds: int) -> np.ndarray:
    return np.flatnonzero(np.isin(program.columns.kind, kinds))


def test_what_does_not_wait_is_named() -> None:
    program = four_replicas()
    row = int(only(program, REDUCE_ACROSS)[0])
    text = text_of(without_row(program, row))
    assert "rank 0 O0 reads 'island_sum', which nothing makes on rank 0" in text
    part = np.where(np.arange(len(program) + 1) == row + 1, 1, 0)
    again = twice(program, row)
    again = replace(again, columns=replace(again.columns, part=again.columns.part + part))
    text = text_of(again)
    assert "rank 0 RA0 makes 'island_sum' again before anything has read that of rank 0 RA0" in text


def test_a_sum_across_islands_needs_several() -> None:
    program = four_replicas()
    text = text_of(replace(program, obligations=replace(program.obligations, methods={})))
    assert "nothing consumes the 'island_sum' that rank 0 RA0 makes" in text


@pytest.mark.parametrize("across", [((0, 3), (1, 2)), ((0, 1), (2, 3))])
def test_islands_that_meet_at_other_places_are_refused(across: tuple[tuple[int, int], ...]) -> None:
    """Ranks 0 and 3 own different shares; ranks 0 and 1 are one island."""
    program = four_replicas()
    columns, groups = program.columns, [*program.groups]
    rows = only(program, REDUCE_ACROSS)
    first = int(columns.group[rows].min())
    group = columns.group.copy()
    for index, members in enumerate(across):
        groups[first + index] = members
        group[rows[np.isin(columns.rank[rows], members)]] = first + index
    wrong = replace(program, groups=tuple(groups), columns=replace(columns, group=group))
    assert "islands: rank 0 RA0 does not add up the same share of every replica once" in text_of(wrong)


def test_a_sum_of_ranks_that_reduce_nothing_is_refused_and_not_an_error() -> None:
    program = four_replicas()
    columns = program.columns
    nowhere = np.where(np.isin(columns.kind, (GATHER, REDUCE)) & (columns.rank == 2), -1, columns.group)
    wrong = replace(program, columns=replace(columns, group=nowhere))
    assert "does not add up the same share of every replica once" in text_of(wrong)


def test_a_rank_is_in_one_island() -> None:
    """Here it gathers with its neighbour and reduces with another."""
    program = four_replicas()
    columns, rows = program.columns, only(program, GATHER)
    group = np.where(columns.group >= 0, columns.group + 2, columns.group)
    group[rows] = [0, 1, 0, 1]
    wrong = replace(program, groups=((0, 2), (1, 3), *program.groups), columns=replace(columns, group=group))
    assert "islands: rank 0 R0 is in another island than what came before" in text_of(wrong)


@pytest.mark.parametrize("sharding", LEVELS)
def test_evaluation_gathers_inside_islands(sharding: Sharding) -> None:
    layout = schedule_layout("breadth-first", 2, 4, (2,) * 4)
    program = build_evaluation_program(layout, methods=asked(sharding, island=2))
    assert verify(program) == []
    used = {program.groups[group] for group in program.columns.group.tolist() if group >= 0}
    assert used == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_reductions_at_the_steps_end_come_before_the_sums_over_islands() -> None:
    layout = schedule_layout("1f1b", 2, 2, (2,) * 4)
    methods = asked("zero-1", island=2, blocking=("reductions", "messages"))
    program = build_training_program(layout, get_schedule("1f1b"), {}, methods=methods)
    assert verify(program) == []


def test_islands_share_something_out() -> None:
    with pytest.raises(InputError, match="layout: zero-0 shares nothing out in islands"):
        program_of(("gpipe", 1, 1, (2,) * 4, 1, 2, "zero-0"))
