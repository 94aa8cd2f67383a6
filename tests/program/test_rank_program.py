"""Parts of programs: each rank's own equals that of the whole, and digests tell parts apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import LOOPED, asked, pipelines, schedule_layout

from weft.describe.replica_grid import ReplicaGrid
from weft.errors import InputError
from weft.methods.tying.program import Tied, TiedWeights
from weft.program.assemble import assemble_part
from weft.program.build import (
    build_evaluation_program,
    build_training_program,
    lowered_evaluation,
    lowered_training,
)
from weft.program.layout import PipelineLayout
from weft.program.program import COLUMN_NAMES, Obligations, Program
from weft.program.rank_program import RankProgram, digests, part_of
from weft.program.schedules import get_schedule

SHARDINGS = ("zero-0", "zero-1", "zero-2", "zero-3")


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, PipelineLayout, dict[str, Any]]:
    """A schedule, a layout for it whose ranks are in any order, and what is asked of methods."""
    name, devices, stages, micro_batches, lanes = draw(pipelines(max_devices=3))
    frozen = draw(st.integers(0, stages - 1)) if name in (*LOOPED, "gpipe", "1f1b") else 0
    layout = schedule_layout(name, devices, stages, micro_batches, lanes, frozen)
    ranks = draw(st.permutations(range(layout.ranks)))
    layout = replace(
        layout,
        stages=tuple(
            replace(one, replicas=tuple(tuple(ranks[rank] for rank in copy) for copy in one.replicas))
            for one in layout.stages
        ),
    )
    return name, layout, draw(methods(layout, lanes))


@st.composite
def methods(draw: st.DrawFn, layout: PipelineLayout, lanes: int) -> dict[str, Any]:
    sharding = draw(st.sampled_from(SHARDINGS))
    islands = [size for size in range(1, layout.replicas + 1) if layout.replicas % size == 0]
    found = asked(
        sharding,
        island=draw(st.sampled_from([None, *islands])) if sharding != "zero-0" else None,
        blocking=draw(st.sampled_from([(), ("messages",), ("messages", "reductions")])),
        norm=draw(st.booleans()),
    )
    last = len(layout.stages) - 1
    if draw(st.booleans()) and layout.frozen_stages < last:
        weights = TiedWeights((layout.frozen_stages, last), 10)
        grid = ReplicaGrid(1, lanes) if draw(st.booleans()) else ReplicaGrid(lanes)
        found["tying"] = Tied((weights,), grid)
    return found


def refused(build: Callable[[], object]) -> bool:
    try:
        build()
    except InputError:
        return True
    return False


def assert_same(one: RankProgram, other: RankProgram) -> None:
    for name in ("rank", "ranks", "micro_batches", "steps_per_cycle", "first_row", "groups", "stages"):
        assert getattr(one, name) == getattr(other, name), name
    for name in COLUMN_NAMES:
        assert np.array_equal(getattr(one.columns, name), getattr(other.columns, name)), name
    for name in ("source", "target", "distance"):
        assert np.array_equal(getattr(one.edges, name), getattr(other.edges, name)), name
    assert np.array_equal(one.ids, other.ids)
    assert_same_owed(one.obligations, other.obligations)
    assert one.digest == other.digest


def assert_same_owed(one: Obligations, other: Obligations) -> None:
    for name in ("purpose", "stage_edges", "owners", "methods"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("forward", "backward", "step"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@settings(max_examples=150)
@given(cases())
def test_the_part_of_every_rank_is_that_of_the_whole_program(
    case: tuple[str, PipelineLayout, dict[str, Any]],
) -> None:
    name, layout, given_methods = case
    schedule, options = get_schedule(name), {"methods": given_methods}
    if refused(lambda: build_training_program(layout, schedule, {}, **options)):
        assert refused(lambda: assemble_part(lowered_training(layout, schedule, {}, **options), 0))
        return
    whole = build_training_program(layout, schedule, {}, **options)
    told = digests(whole).tolist()
    for rank in range(layout.ranks):
        part = assemble_part(lowered_training(layout, schedule, {}, **options), rank)
        assert_same(part, part_of(whole, rank))
        assert part.digest == told[rank]


@given(cases())
def test_the_part_of_an_evaluation_is_that_of_the_whole_program(
    case: tuple[str, PipelineLayout, dict[str, Any]],
) -> None:
    _, layout, given_methods = case
    whole = build_evaluation_program(layout, methods=given_methods)
    for rank in range(layout.ranks):
        assert_same(
            assemble_part(lowered_evaluation(layout, methods=given_methods), rank), part_of(whole, rank)
        )


@given(cases())
def test_a_part_lists_the_instructions_of_its_rank(case: tuple[str, PipelineLayout, dict[str, Any]]) -> None:
    name, layout, given_methods = case
    if refused(lambda: build_training_program(layout, get_schedule(name), {}, methods=given_methods)):
        return
    whole = build_training_program(layout, get_schedule(name), {}, methods=given_methods)
    for rank in range(layout.ranks):
        part = part_of(whole, rank)
        assert list(part.instructions()) == list(whole.of_rank(rank))
        assert len(part) == len(list(part.positions))


def whole_and_layout() -> tuple[Program, PipelineLayout]:
    layout = schedule_layout("breadth-first", 2, 4, (4, 4), 2)
    program = build_training_program(layout, get_schedule("breadth-first"), {}, methods=asked("zero-1"))
    return program, layout


@pytest.mark.parametrize("name", ["peer", "group", "bytes", "micro_batch", "stage", "kind", "part"])
def test_another_row_has_another_digest(name: str) -> None:
    program, _ = whole_and_layout()
    columns = program.columns
    row = int(np.flatnonzero((columns.peer if name == "peer" else columns.group) >= 0)[3])
    changed = getattr(columns, name).copy()
    changed[row] ^= 1
    other = replace(program, columns=replace(columns, **{name: changed}))
    differing = digests(program) != digests(other)
    assert np.flatnonzero(differing).tolist() == [int(columns.rank[row])]


def test_a_dropped_edge_has_another_digest_at_both_ends() -> None:
    program, _ = whole_and_layout()
    edges, ranks = program.edges, program.columns.rank
    row = int(np.flatnonzero(ranks[edges.source] != ranks[edges.target])[0])
    kept = np.arange(len(edges)) != row
    other = replace(
        program,
        edges=replace(
            edges, source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept]
        ),
    )
    ends = {int(ranks[edges.source[row]]), int(ranks[edges.target[row]])}
    assert set(np.flatnonzero(digests(program) != digests(other)).tolist()) == ends


def test_rows_in_another_order_have_another_digest() -> None:
    program, _ = whole_and_layout()
    order = np.arange(len(program))
    order[[0, 1]] = 1, 0
    other = replace(program, columns=program.columns.take(order))
    assert np.flatnonzero(digests(program) != digests(other)).tolist() == [0]


def test_other_members_of_a_group_have_another_digest() -> None:
    program, _ = whole_and_layout()
    group = int(program.columns.group.max())
    swapped = (*program.groups[:group], program.groups[group][::-1], *program.groups[group + 1 :])
    differing = np.flatnonzero(digests(program) != digests(replace(program, groups=swapped)))
    assert differing.tolist() == sorted(program.groups[group])


def test_a_rank_that_holds_nothing_is_refused() -> None:
    _, layout = whole_and_layout()
    with pytest.raises(InputError, match="8 holds no stage; ranks 0 to 7 do"):
        assemble_part(lowered_training(layout, get_schedule("breadth-first"), {}), 8)
