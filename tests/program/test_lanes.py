"""Stages with unlike numbers of ranks in each replica: programs are valid, each lane reads from one lane."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import asked, dealt_layout
from program.mutations import missing_and_doubled, with_value

from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.program.assemble import assemble_part
from weft.program.build import build_evaluation_program, build_training_program, lowered_training
from weft.program.kinds import (
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
)
from weft.program.layout import PipelineLayout
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.verify import verify


@st.composite
def mixed(draw: st.DrawFn) -> PipelineLayout:
    """Stages of a graph with unlike numbers of lanes, and perhaps of replicas, in one or two pipelines."""
    lanes = draw(
        st.lists(st.sampled_from((1, 2, 4)), min_size=2, max_size=3).filter(lambda one: len(set(one)) > 1)
    )
    stages = len(lanes)
    copies = draw(st.lists(st.sampled_from((1, 2)), min_size=stages, max_size=stages))
    copies = [one // gcd(*copies) for one in copies]
    edges = {
        (producer, consumer)
        for consumer in range(1, stages)
        for producer in draw(st.sets(st.integers(0, consumer - 1), min_size=1, max_size=2))
    }
    shares = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
    splits = draw(st.lists(st.sampled_from((1, 2)), min_size=stages, max_size=stages))
    batches = tuple(2 * lcm(*copies) * share for share in shares)
    return dealt_layout(copies, batches, sorted(edges), splits, draw(st.integers(0, 1)), lanes)


def fan(*lanes: int, sharding: Sharding = "zero-0", name: str = "1f1b") -> Program:
    """Stages in a row, in two pipelines."""
    layout = dealt_layout([1] * len(lanes), (4, 4), lanes=lanes)
    return build_training_program(layout, get_schedule(name), {}, methods=asked(sharding, norm=True))


@settings(max_examples=20)
@given(layout=mixed(), name=st.sampled_from(("1f1b", "gpipe")))
def test_every_mixed_layout_has_a_valid_program(layout: PipelineLayout, name: str) -> None:
    lowered = lowered_training(layout, get_schedule(name), {}, asked(norm=True))
    program = build_training_program(layout, get_schedule(name), {}, methods=asked(norm=True))
    assert verify(program) == []
    assert verify(build_evaluation_program(layout)) == []
    for rank in range(program.ranks):
        assert assemble_part(lowered, rank).digest == part_of(program, rank).digest


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_lanes_of_replicas_shard_their_own_weights(sharding: Sharding, name: str) -> None:
    program = fan(2, 1, 4, sharding=sharding, name=name)
    assert verify(program) == []
    # The lanes of two replicas, stage by stage, and all ranks for the norm.
    assert set(program.groups) == {
        *((lane, lane + 2) for lane in (0, 1)),
        (4, 5),
        *((lane, lane + 4) for lane in (6, 7, 8, 9)),
        tuple(range(14)),
    }


@settings(max_examples=20)
@given(layout=mixed())
def test_each_lane_receives_each_value_once_from_the_lane_of_its_share(layout: PipelineLayout) -> None:
    columns = build_training_program(layout, get_schedule("1f1b"), {}).columns
    lane_of = {
        rank: lane for stage in layout.stages for ranks in stage.replicas for lane, rank in enumerate(ranks)
    }
    for send, receive in ((SEND_ACTIVATION, RECEIVE_ACTIVATION), (SEND_GRADIENT, RECEIVE_GRADIENT)):
        ends = []
        for kind, names in (
            (send, ("stage", "part", "micro_batch", "rank", "peer")),
            (receive, ("part", "stage", "micro_batch", "peer", "rank")),
        ):
            rows = np.flatnonzero(columns.kind == kind)
            ends.append(sorted(zip(*(getattr(columns, name)[rows].tolist() for name in names), strict=True)))
        sent, received = ends
        assert sent == received
        for stage, part, _, rank, peer in sent:
            assert lane_of[rank] == lane_of[peer] * layout.lanes[stage] // layout.lanes[part]
        owed = sum(
            layout.lanes[reader] * max(layout.splits[list(edge)]) * sum(layout.micro_batches)
            for edge in layout.edges
            for reader in (edge[1:] if send == SEND_ACTIVATION else edge[:1])
            if send == SEND_ACTIVATION or edge[0] >= layout.frozen_stages
        )
        assert len(received) == owed


@settings(max_examples=20)
@given(layout=mixed())
def test_a_rank_waits_for_others_by_messages_alone(layout: PipelineLayout) -> None:
    program = build_training_program(layout, get_schedule("1f1b"), {})
    columns, edges = program.columns, program.edges
    across = edges.take(columns.rank[edges.source] != columns.rank[edges.target])
    assert len(across)
    assert set(columns.kind[across.source].tolist()) <= {SEND_ACTIVATION, SEND_GRADIENT}
    assert columns.peer[across.source].tolist() == columns.rank[across.target].tolist()


@settings(max_examples=20)
@given(layout=mixed(), data=st.data())
def test_any_missing_or_doubled_instruction_or_edge_is_refused(
    layout: PipelineLayout, data: st.DataObject
) -> None:
    program = build_training_program(layout, get_schedule("1f1b"), {})
    for broken in missing_and_doubled(program, data):
        assert verify(broken)


def test_a_message_to_another_lane_is_refused() -> None:
    program = fan(1, 2)
    row = int(np.flatnonzero(program.columns.kind == SEND_ACTIVATION)[0])
    other = {2: 3, 3: 2}[int(program.columns.peer[row])]
    assert verify(with_value(program, "peer", row, other))


def test_equal_lanes_are_copies_of_one_pipeline() -> None:
    """One stage more, which nothing reads from, gives the others the rows and ids of a mixed layout."""
    plain, mixed = (dealt_layout((1, 1, 1), (4,), [(0, 1)], lanes=lanes) for lanes in ((2, 2, 2), (2, 2, 1)))
    one, other = (build_training_program(layout, get_schedule("1f1b"), {}) for layout in (plain, mixed))
    wanted = other.columns.rank < 4
    assert one.ids[one.columns.rank < 4].tolist() == other.ids[wanted].tolist()
    assert one.columns.peer[one.columns.rank < 4].tolist() == other.columns.peer[wanted].tolist()


def test_sends_of_one_value_to_several_lanes_have_ids_of_their_own() -> None:
    program = fan(1, 4)
    sends = program.columns.kind == SEND_ACTIVATION
    assert sends.sum() == 4 * (program.columns.kind == FORWARD)[program.columns.stage == 0].sum()
    assert len(set(program.ids.tolist())) == len(program)


def test_a_method_that_does_not_know_lanes_is_refused() -> None:
    layout = dealt_layout((1, 1), (4,), lanes=(1, 2))
    methods = asked(told=True)
    with pytest.raises(
        InputError, match="micro-batch-norms: does not run where stages have unlike numbers of ranks"
    ):
        build_training_program(layout, get_schedule("1f1b"), {}, methods=methods)


def test_loops_over_devices_keep_their_lanes() -> None:
    """Stages 0 and 2 share a device of two lanes, stages 1 and 3 one of one lane."""
    narrow, wide = ((0, 1),), ((2,),)
    layout = dealt_layout((1, 1, 1, 1), (4,))
    stages = tuple(
        replace(stage, replicas=(narrow, wide)[index % 2]) for index, stage in enumerate(layout.stages)
    )
    layout = replace(layout, stages=stages)
    for name in ("breadth-first", "depth-first"):
        assert verify(build_training_program(layout, get_schedule(name), {}, methods=asked("zero-1"))) == []
