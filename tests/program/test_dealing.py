"""Stages with unlike numbers of replicas, which deal micro-batches: programs are valid, parts equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import asked, dealt_layout
from program.mutations import missing_and_doubled, with_value

from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.methods.tying.program import TiedWeights
from weft.predict.abstract import PassTimes, ScheduleFigures, simulate_schedule
from weft.program.assemble import assemble_part
from weft.program.build import build_evaluation_program, build_training_program, lowered_training
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    RECEIVE_ACTIVATION,
    SEND_ACTIVATION,
    SEND_GRADIENT,
)
from weft.program.layout import PipelineLayout
from weft.program.program import Columns, Program
from weft.program.rank_program import part_of
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import deals
from weft.program.verify import verify

DEALING = sorted(name for name, schedule in SCHEDULES.items() if deals(schedule))
Edges = tuple[tuple[int, int], ...]


@st.composite
def dealt(draw: st.DrawFn) -> PipelineLayout:
    """Stages of a graph, with any unlike numbers of replicas and any splits, in one or two pipelines."""
    copies = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4).filter(lambda one: len(set(one)) > 1))
    stages = len(copies)
    edges = {
        (producer, consumer)
        for consumer in range(1, stages)
        for producer in draw(st.sets(st.integers(0, consumer - 1), min_size=1, max_size=2))
    }
    shares = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
    splits = draw(st.lists(st.sampled_from((1, 2)), min_size=stages, max_size=stages))
    batches = tuple(lcm(*copies) * share for share in shares)
    return dealt_layout(copies, batches, sorted(edges), splits, draw(st.integers(0, 1)))


def program_of(layout: PipelineLayout, name: str) -> Program:
    return build_training_program(layout, get_schedule(name), {}, methods=asked(norm=True))


def fork(name: str = "1f1b", splits: Sequence[int] = (1, 2, 1)) -> Program:
    """Two branches, of two replicas and of one, behind one stage."""
    return program_of(dealt_layout((1, 2, 1), (4,), ((0, 1), (0, 2)), splits), name)


@settings(max_examples=20)
@given(layout=dealt(), name=st.sampled_from(DEALING))
def test_every_dealt_layout_has_a_valid_program(layout: PipelineLayout, name: str) -> None:
    program = program_of(layout, name)
    assert verify(program) == []
    assert verify(build_evaluation_program(layout)) == []
    lowered = lowered_training(layout, get_schedule(name), {}, asked(norm=True))
    for rank in range(program.ranks):
        assert assemble_part(lowered, rank).digest == part_of(program, rank).digest


@settings(max_examples=20)
@given(layout=dealt(), name=st.sampled_from(DEALING))
def test_a_replica_runs_its_share_and_messages_go_from_maker_to_reader(
    layout: PipelineLayout, name: str
) -> None:
    columns, batch = build_training_program(layout, get_schedule(name), {}).columns, sum(layout.micro_batches)
    rank_of = {}
    for kinds in ([FORWARD], [BACKWARD, BACKWARD_INPUT]):
        for stage, one in enumerate(layout.stages):
            if kinds != [FORWARD] and stage < layout.frozen_stages:
                continue
            ran = _rows(
                columns, np.isin(columns.kind, kinds) & (columns.stage == stage), "micro_batch", "rank"
            )
            assert [number for number, _ in sorted(ran)] == list(range(one.splits * batch))
            rank_of.update({(stage, number): rank for number, rank in ran})
            # The replicas are as many ranges of the batch, in their order.
            assert [rank for _, rank in sorted(ran)] == sorted(rank for _, rank in ran)
            assert {rank for _, rank in ran} == {rank for (rank,) in one.replicas}
    sends = columns.kind == SEND_ACTIVATION
    for stage, part, number, rank, peer in _rows(
        columns, sends, "stage", "part", "micro_batch", "rank", "peer"
    ):
        finer = max(layout.stages[stage].splits, layout.stages[part].splits)
        assert rank_of[stage, number // (finer // layout.stages[stage].splits)] == rank
        assert rank_of[part, number // (finer // layout.stages[part].splits)] == peer
    crossing = sum(max(layout.stages[one].splits for one in edge) for edge in layout.edges)
    assert sends.sum() == crossing * batch


def _rows(columns: Columns, chosen: npt.NDArray[np.bool_], *names: str) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(columns, name)[chosen].tolist() for name in names), strict=True))


@given(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=2, max_size=4))
def test_each_replica_has_one_of_as_many_turns_as_there_are_replicas(copies: list[int]) -> None:
    layout = dealt_layout(copies, (8,))
    for stage, count in enumerate(copies):
        taken = layout.path_copies[layout.turns, stage].reshape(-1, count)
        assert all(sorted(some) == list(range(count)) for some in taken.tolist())


@settings(max_examples=20)
@given(layout=dealt(), data=st.data())
def test_any_missing_or_doubled_instruction_or_edge_is_refused(
    layout: PipelineLayout, data: st.DataObject
) -> None:
    program = build_training_program(layout, get_schedule("1f1b"), {})
    for broken in missing_and_doubled(program, data):
        assert verify(broken)


@pytest.mark.parametrize("kind", [FORWARD, SEND_GRADIENT, RECEIVE_ACTIVATION, REDUCE])
def test_an_instruction_of_another_replica_is_refused(kind: int) -> None:
    program = fork()
    row = int(np.flatnonzero((program.columns.kind == kind) & (program.columns.stage == 1))[0])
    other = 1 - int(program.columns.replica[row])
    assert verify(with_value(program, "replica", row, other))


def test_a_stage_of_one_replica_reduces_with_nobody() -> None:
    columns = fork().columns
    assert columns.stage[columns.kind == REDUCE].tolist() == [1, 1]


def test_copies_of_a_tied_weight_meet_in_all_replicas() -> None:
    layout = dealt_layout((1, 2, 4), (4,))
    tied = asked(tied=[TiedWeights((0, 2), 8)])
    program = build_training_program(layout, get_schedule("1f1b"), {}, methods=tied)
    assert verify(program) == []
    assert (0, 3, 4, 5, 6) in program.groups


@pytest.mark.parametrize(
    ("copies", "held"),
    [((2, 1), (2, 1)), ((1, 2), (4, 1)), ((4, 1, 2), (2, 4, 1)), ((2, 4), (4, 1)), ((2, 3), (3, 1))],
)
def test_1f1b_keeps_every_replica_at_work(copies: tuple[int, ...], held: tuple[int, ...]) -> None:
    def step(micro_batches: int) -> ScheduleFigures:
        times = [PassTimes(Fraction(count), Fraction(2 * count)) for count in copies]
        return simulate_schedule(
            "1f1b", devices=len(copies), micro_batches=micro_batches, stage_times=times, copies=copies
        )

    short, long = step(12), step(24)
    # Every stage takes three units per micro-batch, over all of its replicas.
    assert long.makespan - short.makespan == 3 * 12
    assert long.peak_in_flight == tuple(np.repeat(held, copies).tolist())


def test_orders_that_do_not_deal_and_methods_that_do_not_are_refused() -> None:
    layout = dealt_layout((2, 1), (4,))
    for name in set(SCHEDULES) - set(DEALING):
        with pytest.raises(InputError, match=r"equally many replicas of every stage|multiple of its|devices"):
            build_training_program(layout, get_schedule(name), {})
    with pytest.raises(InputError, match="zero-1 needs equally many replicas of every stage, not 2\\+1"):
        build_training_program(layout, get_schedule("1f1b"), {}, methods=asked("zero-1"))
    with pytest.raises(InputError, match="blocking: does not run where stages have unlike numbers"):
        build_training_program(layout, get_schedule("1f1b"), {}, methods=asked(blocking=["messages"]))


def test_paths_beyond_those_of_the_stages_are_refused() -> None:
    layout = dealt_layout((2, 1), (4,))
    twice_as_many = replace(layout, paths=4, micro_batches=(1, 1, 1, 1))
    with pytest.raises(InputError, match=r"4 paths: stages with \[2, 1\] replicas have 2"):
        twice_as_many.require_valid()
    unlike = replace(layout, micro_batches=(1, 3))
    with pytest.raises(InputError, match=r"its paths must have equal micro-batches, not \[1, 3\]"):
        unlike.require_valid()
