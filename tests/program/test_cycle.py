"""Laws: a cycle of K steps is the step K times over, and what reached to the next step still does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Choice
from weft.errors import InputError
from weft.program.kinds import FORWARD, STEP
from weft.program.lower import LoweredPipeline
from weft.program.passes import repeated
from weft.program.program import Columns, Edges


def step_of(rows: int, edges: list[tuple[int, int, int]], devices: int) -> LoweredPipeline:
    rank = np.sort(np.arange(rows) % devices)
    columns = Columns.of(rows, kind=FORWARD, micro_batch=np.arange(rows), rank=rank)
    source, target, distance = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    return LoweredPipeline(columns, Edges(source=source, target=target, distance=distance))


@given(data=st.data(), rows=st.integers(1, 9), devices=st.integers(1, 3), steps=st.integers(1, 4))
def test_the_unrolled_cycle_is_the_unrolled_step(
    data: st.DataObject, rows: int, devices: int, steps: int
) -> None:
    edge = st.tuples(st.integers(0, rows - 1), st.integers(0, rows - 1), st.integers(0, 5))
    one = step_of(rows, data.draw(st.lists(edge, max_size=12)), devices)
    cycle = repeated(one, steps)
    columns, edges = cycle.columns, cycle.edges
    assert len(columns) == steps * rows
    assert (np.diff(columns.rank) >= 0).all()
    same = np.diff(columns.rank) == 0
    assert (np.diff(columns.iteration)[same] >= 0).all()
    expected = sorted(
        (int(source), int(target), step, step + int(distance))
        for step in range(steps)
        for source, target, distance in zip(
            one.edges.source, one.edges.target, one.edges.distance, strict=True
        )
    )
    found = sorted(
        (
            int(columns.micro_batch[source]),
            int(columns.micro_batch[target]),
            int(columns.iteration[source]),
            int(distance) * steps + int(columns.iteration[target]),
        )
        for source, target, distance in zip(edges.source, edges.target, edges.distance, strict=True)
    )
    assert found == expected


@pytest.mark.parametrize("kind", [FORWARD, STEP])
def test_a_cycle_of_one_step_is_the_step(kind: int) -> None:
    one = step_of(3, [(0, 1, 0), (2, 0, 1)], 1)
    assert repeated(one, 1) is one


def test_a_cycle_that_no_memory_holds_is_refused_in_one_line() -> None:
    plan = make_plan(tiny(), pp=1, dp=2)
    sync = Choice(name="local-averaging", options={"every": 10**6})
    with pytest.raises(InputError, match="after 1000000 steps; a program has at most 4096") as refused:
        make_program(tiny(), plan.model_copy(update={"sync": sync}))
    assert len(refused.value.violations) == 1
