"""Laws: ranks that share a stage complete its matrices after its gradient is whole and before it steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, schedule_layout

from weft.methods.tying.program import TiedWeights
from weft.methods.whole_matrices.kinds import NAME, WHOLE_MATRICES
from weft.methods.whole_matrices.program import Completed
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.checks.report import name
from weft.program.kinds import STEP
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule
from weft.program.verify import require_valid, verify

ORDERS = (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2), ("zb-v", 2))
BYTES = 96


def built(
    order: tuple[str, int],
    pipelines: int,
    *,
    sharding: str = "zero-1",
    island: int | None = None,
    norm: bool = False,
    tied: bool = False,
    completes: bool = True,
) -> Program:
    schedule, loops = order
    layout = schedule_layout(schedule, 2, 2 * loops, (4,) * pipelines)
    weights = [TiedWeights((0, 2 * loops - 1), 96)] if tied else []
    methods = asked(sharding, norm=norm, tied=weights, island=island)
    if completes:
        methods[NAME] = Completed((BYTES,) * len(layout.stages), island)
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


def rows_of(program: Program) -> np.ndarray:
    return np.flatnonzero(program.columns.kind == WHOLE_MATRICES)


@given(
    order=st.sampled_from(ORDERS),
    pipelines=st.sampled_from([1, 2, 3]),
    sharding=st.sampled_from(["zero-1", "zero-2", "zero-3"]),
    norm=st.booleans(),
)
def test_every_step_follows_the_exchange_of_the_ranks_that_share_its_stage(
    order: tuple[str, int], pipelines: int, sharding: str, norm: bool
) -> None:
    program = built(order, pipelines, sharding="zero-0" if pipelines == 1 else sharding, norm=norm)
    require_valid(program)
    columns, rows = program.columns, rows_of(program)
    steps = np.flatnonzero(columns.kind == STEP)
    assert rows.tolist() == ([] if pipelines == 1 else (steps - 1).tolist())
    assert (columns.stage[rows] == columns.stage[rows + 1]).all()
    assert (columns.bytes[rows] == 2 * BYTES).all()


def test_islands_exchange_apart() -> None:
    program = built(("1f1b", 1), 4, island=2)
    require_valid(program)
    groups = {program.groups[group] for group in program.columns.group[rows_of(program)].tolist()}
    assert sorted(map(len, groups)) == [2, 2, 2, 2]


def test_nothing_else_of_a_program_changes() -> None:
    exchanging, plain = (built(("1f1b", 1), 2, completes=one, tied=True) for one in (True, False))
    kept = exchanging.columns.kind != WHOLE_MATRICES
    assert np.array_equal(exchanging.ids[kept], plain.ids)
    assert exchanging.obligations.methods.keys() - plain.obligations.methods.keys() == {NAME}


def test_an_evaluation_exchanges_nothing() -> None:
    layout = schedule_layout("1f1b", 2, 2, (4, 4))
    program = build_evaluation_program(layout, methods={NAME: Completed((BYTES, BYTES))})
    assert not len(rows_of(program))


@pytest.mark.parametrize("norm", [False, True])
def test_an_exchange_needs_what_a_step_needs(norm: bool) -> None:
    program = built(("zb-h1", 1), 2, norm=norm, tied=True)
    edges, kind = program.edges, program.columns.kind
    either = (kind[edges.source] == WHOLE_MATRICES) | (kind[edges.target] == WHOLE_MATRICES)
    for dropped in np.flatnonzero(either).tolist():
        kept = np.arange(len(edges)) != dropped
        without = Edges(source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept])
        problems = " ".join(map(str, verify(replace(program, edges=without))))
        ends = edges.source[dropped], edges.target[dropped]
        source, target = (name(program, int(row)) for row in ends)
        assert f"{target} does not wait for {source}" in problems


def test_an_exchange_among_other_ranks_is_refused() -> None:
    program = built(("1f1b", 1), 4, island=2)
    columns = program.columns
    group = columns.group.copy()
    rows = rows_of(program)
    group[rows] = group[rows[::-1]]
    other = replace(program, columns=replace(columns, group=group))
    assert "WM0 does not meet the ranks that share its stage" in " ".join(map(str, verify(other)))
