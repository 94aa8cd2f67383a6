"""1F1B on a graph of stages: its samples in flight, its programs, and its gain over a chain."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import ring_layout
from program.rendezvous import stuck_rows

from weft.predict.abstract import PassTimes, simulate_schedule
from weft.program.build import build_training_program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline
from weft.program.schedules.graph_1f1b import samples_in_flight
from weft.program.verify import verify
from weft.timeline.figures import peak_in_flight

GRAPH = get_schedule("graph-1f1b")
Edge = tuple[int, int]


@st.composite
def stage_graphs(draw: st.DrawFn, most: int = 6) -> tuple[int, tuple[Edge, ...]]:
    """Any DAG of stages in a topological order; all but the first read some stage."""
    stages = draw(st.integers(1, most))
    edges: set[Edge] = set()
    for stage in range(1, stages):
        producers = draw(st.sets(st.integers(0, stage - 1), min_size=1, max_size=3))
        edges |= {(producer, stage) for producer in producers}
    return stages, tuple(sorted(edges))


@given(st.integers(1, 6), st.integers(1, 12))
def test_on_a_chain_it_is_1f1b(devices: int, micro_batches: int) -> None:
    pipeline = Pipeline(devices, devices, micro_batches)
    for device in range(devices):
        one, other = (schedule.order(pipeline, device, {}) for schedule in (GRAPH, get_schedule("1f1b")))
        assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("edges", "sizes", "turns", "kept"),
    [
        # GraphPipe, figure 5: equal and rising micro-batches.
        (((0, 1), (1, 2)), (4, 4, 4), (1, 1, 1), (12, 8, 4)),
        (((0, 1), (1, 2)), (1, 2, 4), (1, 1, 1), (10, 8, 4)),
        # Strategy files of the official runtime: a chain, four towers, and turns of two small micro-batches.
        (tuple((n, n + 1) for n in range(5)), (64,) * 6, (1,) * 6, (384, 320, 256, 192, 128, 64)),
        (
            ((0, 4), (1, 4), (2, 4), (3, 4), (4, 5)),
            (64,) * 6,
            (1,) * 6,
            (192, 192, 192, 192, 128, 64),
        ),
        (
            tuple((n, n + 1) for n in range(7)),
            (1, *[2] * 7),
            (2, *[1] * 7),
            (16, 14, 12, 10, 8, 6, 4, 2),
        ),
        # A skip connection waits for the longer way.
        (((0, 1), (1, 2), (0, 2)), (1, 1, 1), (1, 1, 1), (3, 2, 1)),
    ],
)
def test_published_samples_in_flight(
    edges: tuple[Edge, ...], sizes: tuple[int, ...], turns: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    assert samples_in_flight(edges, sizes, turns, 10_000) == kept


@given(stage_graphs(), st.integers(1, 10), st.integers(1, 3))
def test_programs_of_any_graph_verify_and_keep_the_samples_in_flight(
    graph: tuple[int, tuple[Edge, ...]], micro_batches: int, k: int
) -> None:
    stages, edges = graph
    layout = ring_layout(stages, stages, (micro_batches,), edges=edges)
    program = build_training_program(layout, GRAPH, {"k": k})
    assert verify(program) == []
    assert stuck_rows(program) == set()
    kept = samples_in_flight(edges, (1,) * stages, (k,) * stages, micro_batches)
    assert tuple(peak_in_flight(program)) == kept


@given(st.integers(1, 4), st.integers(1, 12))
def test_two_branches_are_as_deep_as_one(length: int, micro_batches: int) -> None:
    """Of 2 L + 1 stages, the last joins two branches in no time: (m + L - 1) against (m + 2 L - 1)."""
    join = 2 * length
    branches = [tuple((n, n + 1) for n in range(first, first + length - 1)) for first in (0, length)]
    edges = (*branches[0], *branches[1], (length - 1, join), (join - 1, join))
    times = (*[PassTimes(Fraction(1), Fraction(2))] * join, PassTimes(Fraction(0), Fraction(0)))
    graph, chain = (
        simulate_schedule(
            name, devices=join + 1, micro_batches=micro_batches, stage_times=times, edges=given_edges
        )
        for name, given_edges in (("graph-1f1b", edges), ("1f1b", None))
    )
    assert graph.makespan == 3 * (micro_batches + length - 1)
    assert chain.makespan == 3 * (micro_batches + 2 * length - 1)
    assert max(graph.peak_in_flight) == min(micro_batches, length + 1)


@pytest.mark.parametrize("k", [0, -1, 1.5, "two"])
def test_turns_of_no_micro_batch_are_refused(k: object) -> None:
    reason = GRAPH.refuse(Pipeline(2, 2, 4), {"k": k})  # type: ignore[dict-item]
    assert reason == f"graph-1f1b's k is {k!r}; a whole number of at least 1 is allowed"
