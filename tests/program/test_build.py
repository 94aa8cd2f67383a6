"""The lowering: laws of every built program, then its details."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import pipelines, ring_layout, schedule_layout, training_program
from program.rendezvous import stuck_rows

from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.program.arrays import Ints
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
)
from weft.program.layout import PipelineLayout
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.verify import verify

Case = tuple[str, int, int, tuple[int, ...], int]


def words(program: Program, rank: int) -> str:
    return " ".join(str(instruction) for instruction in program.of_rank(rank))


def count(program: Program, kind: int) -> int:
    return int((program.columns.kind == kind).sum())


@given(pipelines())
def test_every_built_program_is_proved(case: Case) -> None:
    assert verify(training_program(*case)) == []


@given(pipelines(max_devices=3))
def test_every_built_program_runs_to_its_end_under_rendezvous(case: Case) -> None:
    assert stuck_rows(training_program(*case)) == set()


@given(pipelines())
def test_counts_of_instructions(case: Case) -> None:
    program = training_program(*case)
    _, devices, stages, micro_batches, lanes = case
    passes = stages * sum(micro_batches) * lanes
    placement = schedule_layout(*case).placement
    paths = len(placement)
    crossings = int((np.diff(placement) != 0).sum()) * sum(micro_batches) * lanes // paths
    replicas = len(micro_batches) * paths
    assert count(program, FORWARD) == passes
    assert count(program, BACKWARD) + count(program, BACKWARD_INPUT) == passes
    assert count(program, BACKWARD_INPUT) == count(program, BACKWARD_WEIGHT)
    for kind in (SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT):
        assert count(program, kind) == crossings
    assert count(program, REDUCE) == (stages * replicas * lanes if replicas > 1 else 0)
    assert count(program, STEP) == stages * replicas * lanes
    assert len(program.groups) == (devices * lanes // paths if replicas > 1 else 0)


@given(pipelines())
def test_replicas_share_out_the_global_batch(case: Case) -> None:
    program = training_program(*case)
    columns = program.columns
    for stage in range(case[2]):
        mine = (columns.kind == FORWARD) & (columns.stage == stage)
        seen = columns.micro_batch[mine]
        assert np.array_equal(np.sort(seen), np.repeat(np.arange(sum(case[3])), case[4]))
        assert (np.diff(columns.replica[mine][np.argsort(seen, kind="stable")]) >= 0).all()


@given(pipelines(), st.data())
def test_one_pipeline_alone_has_the_same_instructions(case: Case, data: st.DataObject) -> None:
    program = training_program(*case)
    layout = schedule_layout(*case)
    replica = data.draw(st.integers(0, layout.replicas - 1))
    folded = build_training_program(layout, get_schedule(case[0]), {}, only_replica=replica)
    pipeline = replica // layout.paths
    assert np.array_equal(folded.ids, program.ids[program.columns.replica // layout.paths == pipeline])
    assert folded.groups == program.groups
    assert folded.ranks == program.ranks
    assert folded.kept_replica == replica
    assert verify(folded) == []


@given(pipelines())
def test_evaluation_runs_forward_only(case: Case) -> None:
    program = build_evaluation_program(schedule_layout(*case))
    assert verify(program) == []
    assert stuck_rows(program) == set()
    assert set(program.columns.kind.tolist()) <= {FORWARD, SEND_ACTIVATION, RECEIVE_ACTIVATION}
    assert program.obligations.purpose == "evaluate"
    assert (program.edges.distance == 0).all()


def test_receives_are_issued_four_computations_before_their_users() -> None:
    program = training_program("1f1b", 2, 2, (6,))
    assert words(program, 0) == (
        "RB0.0 RB0.1 F0.0 SF0.0 F0.1 SF0.1 RB0.2 B0.0 F0.2 SF0.2 RB0.3 B0.1 F0.3 SF0.3 RB0.4 B0.2 "
        "RB0.5 F0.4 SF0.4 B0.3 F0.5 SF0.5 B0.4 B0.5 O0"
    )
    assert words(program, 1) == (
        "RF1.0 RF1.1 RF1.2 F1.0 B1.0 SB1.0 RF1.3 F1.1 B1.1 SB1.1 RF1.4 F1.2 B1.2 SB1.2 RF1.5 F1.3 B1.3 "
        "SB1.3 F1.4 B1.4 SB1.4 F1.5 B1.5 SB1.5 O1"
    )


def test_two_devices_in_a_loop_are_each_others_neighbour_both_ways() -> None:
    program = training_program("breadth-first", 2, 4, (2,))
    sends = np.flatnonzero(program.columns.kind == SEND_ACTIVATION)
    links = [
        (int(program.columns.rank[row]), int(program.columns.peer[row]), str(program.instruction(row)))
        for row in sends
    ]
    assert links == [
        (0, 1, "SF0.0"),
        (0, 1, "SF0.1"),
        (0, 1, "SF2.0"),
        (0, 1, "SF2.1"),
        (1, 0, "SF1.0"),
        (1, 0, "SF1.1"),
    ]
    assert verify(program) == []


def test_reductions_follow_the_last_backward_and_steps_come_last() -> None:
    program = training_program("breadth-first", 1, 2, (2, 2))
    assert words(program, 0) == "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 R1 B0.0 B0.1 R0 O1 O0"
    assert words(program, 1) == "F0.2 F0.3 F1.2 F1.3 B1.2 B1.3 R1 B0.2 B0.3 R0 O1 O0"
    assert program.groups == ((0, 1),)
    reduces = program.columns.kind == REDUCE
    assert program.columns.bytes[reduces].tolist() == [1001, 1000, 1001, 1000]


def test_tensor_lanes_reduce_with_their_own_lane() -> None:
    program = training_program("gpipe", 2, 2, (1, 1), 2)
    assert program.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    reduces = np.flatnonzero(program.columns.kind == REDUCE)
    for row in reduces:
        assert program.columns.rank[row] in program.groups[program.columns.group[row]]
    sends = program.columns.kind == SEND_ACTIVATION
    assert (program.columns.peer[sends] - program.columns.rank[sends] == 4).all()


def test_next_cycle_waits_for_the_step() -> None:
    program = training_program("gpipe", 2, 2, (2,))
    later = program.edges.distance == 1
    pairs = {
        (str(program.instruction(source)), str(program.instruction(target)))
        for source, target in zip(program.edges.source[later], program.edges.target[later], strict=True)
    }
    assert pairs == {("O0", "F0.0"), ("O0", "F0.1"), ("O1", "F1.0"), ("O1", "F1.1")}


def test_ids_do_not_depend_on_the_schedule() -> None:
    one, two = training_program("gpipe", 3, 3, (4,)), training_program("1f1b", 3, 3, (4,))
    assert set(one.ids.tolist()) == set(two.ids.tolist())
    assert one.ids.tolist() != two.ids.tolist()


class Branches:
    """Four stages in a diamond: 0 feeds 1 and 2, both feed 3; device 1 runs 1 and 2."""

    name: ClassVar[str] = "branches"
    synonyms: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, str]] = {"wide": "how wide"}

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        return None

    def placement(self, pipeline: Pipeline) -> Ints:
        return np.array([2, 0, 0, 1])

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        stages = np.flatnonzero(self.placement(pipeline) == device)
        total = pipeline.micro_batches
        return ComputeOrder(
            kind=np.repeat([FORWARD, BACKWARD], len(stages) * total),
            stage=np.concatenate([np.repeat(stages, total), np.repeat(stages[::-1], total)]),
            micro_batch=np.tile(np.arange(total), 2 * len(stages)),
        )


def diamond(micro_batches: tuple[int, ...]) -> PipelineLayout:
    layout = ring_layout(3, 4, micro_batches, edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    first, second, third, _ = layout.stages
    return PipelineLayout(
        stages=(first, second, second, third),
        micro_batches=micro_batches,
        message_bytes=layout.message_bytes,
    )


@pytest.mark.parametrize("micro_batches", [(1,), (3,), (2, 3)])
def test_stages_may_form_any_graph_and_devices_any_numbering(micro_batches: tuple[int, ...]) -> None:
    program = build_training_program(diamond(micro_batches), Branches(), {})
    assert verify(program) == []
    assert stuck_rows(program) == set()
    assert count(program, SEND_ACTIVATION) == 4 * sum(micro_batches)
    joins = (program.columns.kind == RECEIVE_ACTIVATION) & (program.columns.stage == 3)
    assert set(program.columns.part[joins].tolist()) == {1, 2}


class Split(Branches):
    """Backward in two parts, the weight parts at the end."""

    name: ClassVar[str] = "split"

    def placement(self, pipeline: Pipeline) -> Ints:
        return np.arange(pipeline.stages)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        total = pipeline.micro_batches
        return ComputeOrder(
            kind=np.repeat([FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT], total),
            stage=np.full(3 * total, device),
            micro_batch=np.tile(np.arange(total), 3),
        )


def test_backward_may_run_in_two_parts() -> None:
    program = build_training_program(ring_layout(2, 2, (2, 2)), Split(), {})
    assert verify(program) == []
    assert words(program, 0) == "RB0.0 RB0.1 F0.0 SF0.0 F0.1 SF0.1 I0.0 I0.1 W0.0 W0.1 R0 O0"


class Forgetful(Branches):
    """Leaves the last backward out."""

    name: ClassVar[str] = "forgetful"

    def placement(self, pipeline: Pipeline) -> Ints:
        return np.arange(pipeline.stages)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        whole = get_schedule("gpipe").order(pipeline, device, options)
        return ComputeOrder(*(column[:-1] for column in whole))


def test_an_incomplete_order_is_refused() -> None:
    with pytest.raises(InputError, match="'forgetful' must run every stage and micro-batch exactly once"):
        build_training_program(ring_layout(2, 2, (2,)), Forgetful(), {})


def test_ranks_that_contradict_the_placement_are_refused() -> None:
    with pytest.raises(InputError, match="breadth-first places stages"):
        build_training_program(diamond((1,)), get_schedule("breadth-first"), {})


def test_what_the_schedule_refuses_and_unknown_options_are_listed_together() -> None:
    with pytest.raises(InputError) as caught:
        build_training_program(ring_layout(2, 4, (1,)), get_schedule("gpipe"), {"loops": 2})
    assert [str(violation) for violation in caught.value.violations] == [
        "schedule.options.loops: gpipe has no such option; it has none",
        "schedule: gpipe runs one stage per device, not 4 stages on 2 devices",
    ]


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="nearest valid: wide"):
        build_training_program(diamond((1,)), Branches(), {"wid": 1})


def test_an_unknown_replica_is_refused() -> None:
    with pytest.raises(InputError, match=r"2 is not one of 0\.\.1 \(nearest valid: 1\)"):
        build_training_program(ring_layout(1, 1, (1, 1)), get_schedule("gpipe"), {}, only_replica=2)


def test_a_large_program_has_all_its_instructions_and_is_proved() -> None:
    program = training_program("breadth-first", 64, 512, (128,))
    assert int(np.isin(program.columns.kind, (FORWARD, BACKWARD)).sum()) == 131_072
    assert len(np.unique(program.queue)) == 64 + 4 * 64
    assert verify(program) == []
    assert {KINDS[kind].name for kind in np.unique(program.columns.kind)} >= {"forward", "step"}
