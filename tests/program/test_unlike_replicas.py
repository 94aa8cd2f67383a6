"""Replicas of one stage with unlike numbers of ranks: programs are valid, every shard is summed once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import asked, dealt_layout
from program.mutations import with_value

from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.program.assemble import assemble_part
from weft.program.build import build_evaluation_program, build_training_program, lowered_training
from weft.program.kinds import RECEIVE_ACTIVATION, RECEIVE_GRADIENT, STEP
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.verify import verify


def unlike_layout(widths: list[tuple[int, ...]], micro_batches: tuple[int, ...]) -> PipelineLayout:
    """Stages in a row; `widths` has the ranks of each replica, by stage. Bytes tell pipelines apart."""
    rank, edges = count(), [(stage, stage + 1) for stage in range(len(widths) - 1)]
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(tuple(islice(rank, width)) for width in each), gradient_bytes=1000 + stage
            )
            for stage, each in enumerate(widths)
        ),
        micro_batches=micro_batches,
        message_bytes=dict.fromkeys(edges, 1),
        own_bytes=tuple(
            (dict.fromkeys(edges, 64 + one), dict.fromkeys(edges, 32 + one))
            for one in range(len(micro_batches))
        ),
    )


@st.composite
def unlike(draw: st.DrawFn) -> PipelineLayout:
    """One to three stages in two or three pipelines, with unlike numbers of ranks in some stage."""
    stages, pipelines = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    each = st.tuples(*[st.sampled_from((1, 2, 4))] * pipelines)
    widths = draw(
        st.lists(each, min_size=stages, max_size=stages).filter(
            lambda found: any(len(set(one)) > 1 for one in found)
        )
    )
    shares = draw(st.lists(st.integers(1, 3), min_size=pipelines, max_size=pipelines))
    return unlike_layout(widths, tuple(shares))


@settings(max_examples=20)
@given(
    layout=unlike(),
    name=st.sampled_from(("1f1b", "gpipe", "zb-h1")),
    sharding=st.sampled_from(("zero-0", "zero-1")),
    norm=st.booleans(),
)
def test_every_layout_of_unlike_replicas_has_a_valid_program(
    layout: PipelineLayout, name: str, sharding: Sharding, norm: bool
) -> None:
    methods = asked(sharding, norm=norm)
    lowered = lowered_training(layout, get_schedule(name), {}, methods)
    program = build_training_program(layout, get_schedule(name), {}, methods=methods)
    assert verify(program) == []
    assert verify(build_evaluation_program(layout)) == []
    assert len(set(program.ids.tolist())) == len(program)
    for rank in range(program.ranks):
        assert assemble_part(lowered, rank).digest == part_of(program, rank).digest


@settings(max_examples=20)
@given(layout=unlike())
def test_each_replica_adds_up_each_shard_once_with_all_others(layout: PipelineLayout) -> None:
    """A rank of a replica of n ranks beside one of w sends w / n shards, each as large as a rank's of w."""
    program = build_training_program(layout, get_schedule("1f1b"), {})
    columns = program.columns
    for index, stage in enumerate(layout.stages):
        rows = np.flatnonzero((columns.kind == REDUCE) & (columns.stage == index))
        widest = layout.lanes[index]
        assert set(columns.bytes[rows].tolist()) == {stage.gradient_bytes}
        held = Counter(zip(columns.rank[rows].tolist(), columns.part[rows].tolist(), strict=True))
        assert held == Counter(
            (ranks[shard * len(ranks) // widest], shard if len(set(stage.widths.tolist())) > 1 else 0)
            for ranks in stage.replicas
            for shard in range(widest)
        )
        if len(set(stage.widths.tolist())) > 1:
            for row in rows.tolist():
                shard = int(columns.part[row])
                members = tuple(ranks[shard * len(ranks) // widest] for ranks in stage.replicas)
                assert program.groups[columns.group[row]] == members


@settings(max_examples=20)
@given(layout=unlike())
def test_a_step_waits_for_all_shards_of_its_rank(layout: PipelineLayout) -> None:
    program = build_training_program(layout, get_schedule("1f1b"), {})
    columns, edges = program.columns, program.edges
    into = (columns.kind[edges.source] == REDUCE) & (columns.kind[edges.target] == STEP)
    awaited = set(zip(edges.source[into].tolist(), edges.target[into].tolist(), strict=True))
    steps = {
        (int(columns.rank[row]), int(columns.stage[row])): row
        for row in np.flatnonzero(columns.kind == STEP).tolist()
    }
    assert awaited == {
        (row, steps[int(columns.rank[row]), int(columns.stage[row])])
        for row in np.flatnonzero(columns.kind == REDUCE).tolist()
    }


def test_messages_have_the_bytes_of_their_own_pipeline() -> None:
    columns = build_training_program(
        unlike_layout([(2, 1), (1, 4)], (2, 2)), get_schedule("gpipe"), {}
    ).columns
    for kind, first in ((RECEIVE_ACTIVATION, 64), (RECEIVE_GRADIENT, 32)):
        for pipeline in (0, 1):
            rows = (columns.kind == kind) & (columns.replica == pipeline)
            assert set(columns.bytes[rows].tolist()) == {first + pipeline}


def test_equal_replicas_have_the_program_of_before() -> None:
    """The bytes of each pipeline by itself, where they are equal, change nothing."""
    plain = dealt_layout([1, 1], (4, 4), lanes=(2, 1))
    same = (plain.message_bytes, plain.message_bytes)
    given_apart = replace(plain, own_bytes=(same, same))
    programs = [
        build_training_program(one, get_schedule("1f1b"), {}, methods=asked("zero-1"))
        for one in (plain, given_apart)
    ]
    assert programs[0].ids.tolist() == programs[1].ids.tolist()
    assert programs[0].columns.part[programs[0].columns.kind == REDUCE].tolist() == [0] * 6


def broken(program: Program, column: str, row: int, value: int) -> list[str]:
    return [str(one) for one in verify(with_value(program, column, row, value))]


def test_a_sum_of_unlike_shards_is_refused() -> None:
    program = build_training_program(unlike_layout([(2, 2, 1)], (2, 2, 2)), get_schedule("1f1b"), {})
    rows = np.flatnonzero(program.columns.kind == REDUCE)
    # Both sums of the narrow replica change places, with all of their members.
    swapped = np.array(program.columns.part)
    swapped[rows] = 1 - swapped[rows]
    found = verify(replace(program, columns=replace(program.columns, part=swapped)))
    assert any("do not all hold shard" in str(one) for one in found)
    assert broken(program, "group", int(rows[0]), int(program.columns.group[rows[-1]]))


@pytest.mark.parametrize(
    ("layout", "sharding", "words"),
    [
        (unlike_layout([(4, 3)], (1, 1)), "zero-0", "one must be a multiple of the other"),
        (unlike_layout([(4, 2)], (1, 1)), "zero-2", "zero-2 needs replicas of equally many ranks"),
    ],
)
def test_what_unlike_replicas_cannot_do_is_said(
    layout: PipelineLayout, sharding: Sharding, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        build_training_program(layout, get_schedule("1f1b"), {}, methods=asked(sharding))
