"""ZB-H1 on a graph of stages: legal programs, no more in flight than the deepest stage, and less waiting."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import ring_layout
from program.rendezvous import stuck_rows
from program.schedules.test_graph_1f1b import Edge, stage_graphs

from weft.predict.abstract import simulate_schedule
from weft.program.build import build_training_program
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline
from weft.program.schedules.graph_1f1b import samples_in_flight
from weft.program.verify import verify
from weft.timeline.figures import peak_in_flight

GRAPH = get_schedule("graph-zb-h1")
# A stage, branches of two stages and of one, and a stage that joins them.
FORK: tuple[Edge, ...] = ((0, 1), (0, 3), (1, 2), (2, 4), (3, 4))


@given(st.integers(1, 6), st.integers(1, 12))
def test_on_a_chain_it_is_zb_h1(devices: int, micro_batches: int) -> None:
    pipeline = Pipeline(devices, devices, micro_batches)
    for device in range(devices):
        one, other = (schedule.order(pipeline, device, {}) for schedule in (GRAPH, get_schedule("zb-h1")))
        assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))


@given(stage_graphs(), st.integers(1, 10), st.data())
def test_programs_of_any_graph_verify_and_keep_no_more_than_the_deepest_stage(
    graph: tuple[int, tuple[Edge, ...]], micro_batches: int, data: st.DataObject
) -> None:
    stages, edges = graph
    whole = data.draw(st.sets(st.integers(0, stages - 1)))
    layout = ring_layout(stages, stages, (micro_batches,), edges=edges)
    program = build_training_program(layout, GRAPH, {"whole": ",".join(map(str, sorted(whole)))})
    assert verify(program) == []
    assert stuck_rows(program) == set()
    kept = samples_in_flight(edges, (1,) * stages, (1,) * stages, micro_batches)
    held = peak_in_flight(program)
    assert all(held[stage] == (kept[stage] if stage in whole else max(kept)) for stage in range(stages))


@given(st.integers(1, 10), st.sets(st.integers(0, 4)))
def test_stages_split_backwards_but_those_that_are_whole(micro_batches: int, whole: set[int]) -> None:
    pipeline = Pipeline(5, 5, micro_batches, FORK)
    for device in range(5):
        order = GRAPH.order(pipeline, device, {"whole": ",".join(map(str, sorted(whole)))})
        parts = {BACKWARD} if device in whole else {BACKWARD_INPUT, BACKWARD_WEIGHT}
        assert set(order.kind.tolist()) == {FORWARD, *parts}


@pytest.mark.parametrize("micro_batches", [5, 8, 16])
def test_weight_parts_fill_waits_of_a_graph(micro_batches: int) -> None:
    """A third of what 1F1B waits, if all three parts take equal times."""
    steps = [
        simulate_schedule(
            name,
            devices=5,
            micro_batches=micro_batches,
            edges=FORK,
            forward=Fraction(1),
            backward=Fraction(2),
        ).makespan
        for name in ("graph-1f1b", "graph-zb-h1")
    ]
    assert steps == [3 * (micro_batches + 3), 3 * micro_batches + 3]


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=5, max_size=5), st.integers(1, 4))
def test_replicas_deal_with_micro_batches(copies: list[int], rounds: int) -> None:
    pipeline = Pipeline(5, 5, 4 * rounds, FORK, tuple(copies))
    for device, count in enumerate(copies):
        order = GRAPH.order(pipeline, device, {})
        assert len(order.kind) == 3 * 4 * rounds // count


@pytest.mark.parametrize("whole", ["5", "-1", "a", "0;1"])
def test_stages_that_are_not_there_are_refused(whole: str) -> None:
    reason = GRAPH.refuse(Pipeline(5, 5, 4, FORK), {"whole": whole})
    assert reason == f"graph-zb-h1's whole is {whole!r}; stages from 0 to 4 are allowed, as 0,2"
