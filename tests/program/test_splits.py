"""Stages that form a graph, and split micro-batches: programs are valid, parts equal, mutations refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, placed_layout
from program.mutations import twice, without_edge

from weft.errors import InputError
from weft.program.assemble import assemble_part
from weft.program.build import build_evaluation_program, build_training_program, lowered_training
from weft.program.kinds import FORWARD, MESSAGES, SEND_ACTIVATION, SEND_GRADIENT
from weft.program.layout import PipelineLayout
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.verify import verify

DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))
COUNTS = (1, 2, 4)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[str, PipelineLayout]:
    """A schedule and a layout whose stages form a graph: later stages read some earlier ones."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "breadth-first"]))
    devices = draw(st.integers(2, 4))
    stages = devices * (draw(st.integers(1, 2)) if name == "breadth-first" else 1)
    edges = {
        (producer, consumer)
        for consumer in range(1, stages)
        for producer in draw(st.sets(st.integers(0, consumer - 1), max_size=3))
    }
    read = {producer for producer, _ in edges}
    edges |= {(stage, stages - 1) for stage in range(stages - 1) if stage not in read}
    placement = [stage % devices for stage in range(stages)]
    shares = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    layout = placed_layout(placement, shares, draw(st.integers(1, 2)), tuple(sorted(edges)))
    splits = draw(st.lists(st.sampled_from(COUNTS), min_size=stages, max_size=stages))
    return name, splitting(layout, splits)


def splitting(layout: PipelineLayout, splits: list[int]) -> PipelineLayout:
    stages = zip(layout.stages, splits, strict=True)
    return replace(layout, stages=tuple(replace(one, splits=count) for one, count in stages))


def diamond(schedule: str = "1f1b", splits: tuple[int, ...] = (1, 2, 4, 1)) -> Program:
    layout = splitting(placed_layout([0, 1, 2, 3], (3,), edges=DIAMOND), list(splits))
    return build_training_program(layout, get_schedule(schedule), {})


@given(case=graphs())
def test_every_graph_has_a_valid_program(case: tuple[str, PipelineLayout]) -> None:
    name, layout = case
    program = build_training_program(layout, get_schedule(name), {})
    assert verify(program) == []
    assert verify(build_evaluation_program(layout)) == []
    for rank in range(program.ranks):
        part = assemble_part(lowered_training(layout, get_schedule(name), {}), rank)
        assert part.digest == part_of(program, rank).digest
        assert part.micro_batches == part_of(program, rank).micro_batches == sum(layout.micro_batches)


@given(case=graphs())
def test_every_sample_crosses_every_edge_once(case: tuple[str, PipelineLayout]) -> None:
    name, layout = case
    columns = build_training_program(layout, get_schedule(name), {}).columns
    placement, lanes = layout.placement[0], len(layout.stages[0].replicas[0])
    for kind, (producer_column, consumer_column) in (
        (SEND_ACTIVATION, (columns.stage, columns.part)),
        (SEND_GRADIENT, (columns.part, columns.stage)),
    ):
        for producer, consumer in layout.edges:
            finer = max(layout.stages[producer].splits, layout.stages[consumer].splits)
            rows = (columns.kind == kind) & (producer_column == producer) & (consumer_column == consumer)
            away = placement[producer] != placement[consumer]
            expected = np.repeat(np.arange(finer * sum(layout.micro_batches)), lanes) if away else []
            assert np.sort(columns.micro_batch[rows]).tolist() == list(expected)


def test_micro_batches_of_a_stage_are_parts_of_those_of_the_batch() -> None:
    columns = diamond().columns
    forward = columns.kind == FORWARD
    for stage, splits in enumerate((1, 2, 4, 1)):
        assert columns.micro_batch[forward & (columns.stage == stage)].tolist() == list(range(3 * splits))


def test_the_verifier_refuses_what_crosses_with_the_samples_of_another() -> None:
    program = diamond()
    columns = program.columns
    for send, receive in MESSAGES:
        rows = {
            kind: np.flatnonzero((columns.kind == kind) & (np.minimum(columns.stage, columns.part) == 0))
            for kind in (send, receive)
        }
        # Both ends agree, and on the wrong samples: the third part comes twice, the second never.
        micro_batch = columns.micro_batch.copy()
        for found in rows.values():
            micro_batch[found[(columns.micro_batch[found] == 1)]] = 2
        broken = replace(program, columns=replace(columns, micro_batch=micro_batch))
        assert verify(broken), send


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_verifier_refuses_a_program_without_an_edge_between_stages(schedule: str) -> None:
    program = diamond(schedule)
    columns, edges = program.columns, program.edges
    crosses = columns.rank[edges.source] != columns.rank[edges.target]
    sends = np.isin(columns.kind[edges.target], [send for send, _ in MESSAGES])
    for edge in np.flatnonzero(crosses | sends)[::7].tolist():
        assert verify(without_edge(program, edge)), edge


def test_the_verifier_refuses_a_part_that_runs_twice() -> None:
    program = diamond()
    second = np.flatnonzero((program.columns.kind == FORWARD) & (program.columns.stage == 2))[1]
    assert any("stage 2, micro-batch 1" in str(one) for one in verify(twice(program, int(second))))


def test_stages_that_split_unlike_are_refused_in_one_line() -> None:
    layout = splitting(placed_layout([0, 1, 2, 3], (3,), edges=DIAMOND), [1, 2, 3, 6])
    assert layout._problems == []
    with pytest.raises(InputError) as caught:
        splitting(layout, [2, 3, 1, 6]).require_valid()
    assert str(caught.value) == (
        "stages 0 and 1: split micro-batches in 2 and 3; one must be a multiple of the other "
        "(nearest valid: 2 and 2)"
    )


def test_norms_of_micro_batches_are_refused_where_stages_split_them() -> None:
    layout = splitting(placed_layout([0, 1, 2, 3], (3,), edges=DIAMOND), [1, 2, 1, 1])
    with pytest.raises(InputError, match="stages that split micro-batches see gradients of parts"):
        build_training_program(layout, get_schedule("1f1b"), {}, methods=asked(told=True))
