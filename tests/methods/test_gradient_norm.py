"""Laws: every rank that steps takes the norm once, of everything that is reduced, before it steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, placed_layout

from weft.methods.gradient_norm.kinds import NORM
from weft.methods.gradient_norm.program import NORM_BYTES
from weft.methods.tying.program import TiedWeights
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.checks.report import name
from weft.program.kinds import MAKES_GRADIENTS, STEP
from weft.program.layout import PipelineLayout
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements
from weft.program.verify import require_valid, verify

ORDERS = (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2), ("zb-v", 2), ("chimera", 1))


def layout_of(schedule: str, loops: int, devices: int, pipelines: int) -> PipelineLayout:
    pipeline = Pipeline(devices=devices, stages=devices * loops, micro_batches=2 * devices)
    return placed_layout(placements(get_schedule(schedule), pipeline), (2 * devices,) * pipelines, 2)


def built(
    layout: PipelineLayout, schedule: str, sharding: str = "zero-0", *, norm: bool = True, tied: bool = False
) -> Program:
    weights = [TiedWeights((0, len(layout.stages) - 1), 96)] if tied else []
    methods = asked(sharding, norm=norm, tied=weights)
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


@given(
    order=st.sampled_from(ORDERS),
    devices=st.sampled_from([2, 4]),
    pipelines=st.integers(1, 3),
    tied=st.booleans(),
    sharding=st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]),
)
def test_every_rank_that_steps_takes_part_once(
    order: tuple[str, int], devices: int, pipelines: int, tied: bool, sharding: str
) -> None:
    program = built(layout_of(*order, devices, pipelines), order[0], sharding, tied=tied)
    require_valid(program)
    columns = program.columns
    rows = np.flatnonzero(columns.kind == NORM)
    assert columns.rank[rows].tolist() == list(range(program.ranks))
    assert set(columns.bytes[rows].tolist()) == {NORM_BYTES}
    assert {program.groups[group] for group in columns.group[rows].tolist()} == {tuple(range(program.ranks))}
    for rank in range(program.ranks):
        mine = np.flatnonzero(columns.rank == rank)
        first_step = mine[columns.kind[mine] == STEP][0]
        assert columns.kind[first_step - 1] == NORM


def test_nothing_else_of_a_program_changes() -> None:
    layout = layout_of("1f1b", 1, 4, 2)
    watched, plain = built(layout, "1f1b", tied=True), built(layout, "1f1b", norm=False, tied=True)
    kept = watched.columns.kind != NORM
    assert np.array_equal(watched.ids[kept], plain.ids)
    assert watched.groups[:-1] == plain.groups
    assert watched.obligations.methods.keys() - plain.obligations.methods.keys() == {"gradient-norm"}


def test_ranks_whose_stages_are_frozen_take_no_part() -> None:
    layout = replace(layout_of("1f1b", 1, 4, 1), frozen_stages=2)
    program = built(layout, "1f1b")
    require_valid(program)
    trained = {rank for stage in layout.stages[2:] for ranks in stage.replicas for rank in ranks}
    assert set(program.columns.rank[program.columns.kind == NORM].tolist()) == trained
    assert set(program.groups[-1]) == trained


def test_an_evaluation_takes_no_norm() -> None:
    program = build_evaluation_program(layout_of("1f1b", 1, 2, 1))
    require_valid(program)
    assert not (program.columns.kind == NORM).any()


@pytest.mark.parametrize(("order", "pipelines"), [(("1f1b", 1), 1), (("breadth-first", 2), 2)])
def test_every_edge_of_the_norm_is_needed(order: tuple[str, int], pipelines: int) -> None:
    program = built(layout_of(*order, 2, pipelines), order[0], tied=True)
    edges, kind = program.edges, program.columns.kind
    # Where gradients are reduced it waits for the last computations, too, which their reductions imply.
    implied = np.isin(kind[edges.source], MAKES_GRADIENTS) & (pipelines > 1)
    own = np.flatnonzero(((kind[edges.source] == NORM) | (kind[edges.target] == NORM)) & ~implied)
    assert len(own) > 0
    for dropped in own.tolist():
        kept = np.arange(len(edges)) != dropped
        without = Edges(source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept])
        problems = [str(one) for one in verify(replace(program, edges=without))]
        ends = edges.source[dropped], edges.target[dropped]
        maker, reader = (name(program, int(row)) for row in ends)
        assert any(f"{reader} does not wait for {maker}, which makes its" in one for one in problems)


def test_a_norm_that_nobody_owes_is_refused() -> None:
    program = built(layout_of("1f1b", 1, 2, 1), "1f1b")
    lighter = replace(program, obligations=replace(program.obligations, methods={}))
    assert "nothing reads the 'gradient_norm' that rank 0 N0 makes" in str(verify(lighter)[0])
