"""Laws: copies of a weight reduce their gradients together, after making them and before stepping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import asked, placed_layout, ring_layout

from weft.describe.plan import Sharding
from weft.describe.replica_grid import ReplicaGrid
from weft.errors import InputError
from weft.methods.gradient_norm.kinds import NORM
from weft.methods.sharding.kinds import REDUCE, REDUCE_ACROSS
from weft.methods.tying.kinds import REDUCE_TIED
from weft.methods.tying.program import Tied, TiedWeights, groups
from weft.program.arrays import Ints
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.kinds import STEP
from weft.program.layout import PipelineLayout
from weft.program.program import Edges, Groups, Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements
from weft.program.verify import require_valid, verify

ORDERS = (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2), ("zb-v", 2), ("chimera", 1))


def tied_layout(schedule: str, loops: int, devices: int, pipelines: int, lanes: int = 1) -> PipelineLayout:
    pipeline = Pipeline(devices=devices, stages=devices * loops, micro_batches=2 * devices)
    table = placements(get_schedule(schedule), pipeline)
    return placed_layout(table, (2 * devices,) * pipelines, lanes)


def ends_of(layout: PipelineLayout) -> tuple[TiedWeights, ...]:
    """A weight of 96 bytes that the first and the last of the stages share."""
    return (TiedWeights((0, len(layout.stages) - 1), 96),)


def built(
    layout: PipelineLayout,
    schedule: str,
    sharding: str = "zero-0",
    *,
    weights: tuple[TiedWeights, ...] | None = None,
    island: int | None = None,
    shards: bool = False,
) -> Program:
    tied = ends_of(layout) if weights is None else weights
    methods = asked(sharding, island=island, tied=tied, norm=shards)
    if shards:
        methods["tying"] = replace(methods["tying"], sharers=island or layout.replicas)
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


layouts = st.tuples(
    st.sampled_from(ORDERS), st.sampled_from([2, 4]), st.integers(1, 3), st.sampled_from([1, 2])
)


@settings(max_examples=40)
@given(choice=layouts, sharding=st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]))
def test_every_device_with_a_copy_takes_part_once(
    choice: tuple[tuple[str, int], int, int, int], sharding: str
) -> None:
    (schedule, loops), devices, pipelines, lanes = choice
    layout = tied_layout(schedule, loops, devices, pipelines, lanes)
    program = built(layout, schedule, sharding)
    require_valid(program)
    columns = program.columns
    rows = np.flatnonzero(columns.kind == REDUCE_TIED)
    [one] = ends_of(layout)
    holders = {rank for stage in one.stages for ranks in layout.stages[stage].replicas for rank in ranks}
    assert sorted(columns.rank[rows].tolist()) == sorted(holders)
    assert set(columns.bytes[rows].tolist()) == {96}
    groups = [set(program.groups[group]) for group in set(columns.group[rows].tolist())]
    # One group for every lane, which together are all holders.
    assert len(groups) == lanes
    assert set.union(*groups) == holders
    for rank in holders:
        mine = np.flatnonzero(columns.rank == rank)
        first_step = mine[columns.kind[mine] == STEP][0]
        assert columns.kind[first_step - 1] == REDUCE_TIED


@settings(max_examples=40)
@given(
    choice=layouts,
    sharding=st.sampled_from(["zero-1", "zero-2", "zero-3"]),
    in_islands=st.booleans(),
)
def test_ranks_with_all_shards_of_a_copy_exchange_once(
    choice: tuple[tuple[str, int], int, int, int], sharding: Sharding, in_islands: bool
) -> None:
    (schedule, loops), devices, pipelines, lanes = choice
    layout = tied_layout(schedule, loops, devices, 2 * pipelines, lanes)
    island = layout.replicas // 2 if in_islands and layout.replicas > 2 else None
    program = built(layout, schedule, sharding, island=island, shards=True)
    require_valid(program)
    columns = program.columns
    rows = np.flatnonzero(columns.kind == REDUCE_TIED)
    [one] = ends_of(layout)
    for group in set(columns.group[rows].tolist()):
        members = set(program.groups[group])
        # Each stage's gradient is reduced, and gathered, by an island of it inside the group.
        for stage in one.stages:
            mine = (columns.kind == REDUCE) & (columns.stage == stage) & np.isin(columns.rank, [*members])
            [inside] = {program.groups[each] for each in columns.group[mine].tolist()}
            assert set(inside) <= members
            assert len(inside) == (island or layout.replicas)
    # It comes after the last reductions of the device, before the norm and the first step.
    for row in rows.tolist():
        of_rank = columns.rank == columns.rank[row]
        sums = np.flatnonzero(of_rank & np.isin(columns.kind, (REDUCE, REDUCE_ACROSS)))
        assert sums.max() < row < np.flatnonzero(of_rank & np.isin(columns.kind, (NORM, STEP))).min()


def test_nothing_else_of_a_program_changes() -> None:
    layout = tied_layout("1f1b", 1, 4, 2)
    tied, plain = built(layout, "1f1b"), built(layout, "1f1b", weights=())
    kept = tied.columns.kind != REDUCE_TIED
    assert np.array_equal(tied.ids[kept], plain.ids)
    assert tied.groups[: len(plain.groups)] == plain.groups


def test_an_evaluation_reduces_nothing() -> None:
    program = build_evaluation_program(tied_layout("1f1b", 1, 2, 1))
    require_valid(program)
    assert not (program.columns.kind == REDUCE_TIED).any()


def without(program: Program, *, into: bool) -> Program:
    """The program without the edges into, or out of, its reductions of tied weights."""
    edges = program.edges
    end = edges.target if into else edges.source
    kept = program.columns.kind[end] != REDUCE_TIED
    return replace(
        program,
        edges=Edges(source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept]),
    )


def test_the_verifier_finds_what_is_missing() -> None:
    program = built(tied_layout("zb-h1", 1, 2, 1), "zb-h1")
    texts = [
        " ".join(map(str, verify(broken)))
        for broken in (without(program, into=True), without(program, into=False))
    ]
    assert "rank 0 T0 does not wait for rank 0 W0.0, which makes its 'tied_gradient'" in texts[0]
    assert "rank 0 O0 does not wait for rank 0 T0, which makes its 'reduced_tied_gradient'" in texts[1]
    sharded = built(tied_layout("1f1b", 1, 2, 4), "1f1b", "zero-1", island=2, shards=True)
    text = " ".join(map(str, verify(without(sharded, into=True))))
    assert "rank 0 T0 does not wait for rank 0 R0, which makes its 'reduced_gradient'" in text
    assert "rank 0 T0 does not wait for rank 0 RA0, which makes its 'island_sum'" in text
    unknown = replace(program, obligations=replace(program.obligations, methods={}))
    assert "rank 0 T0 reads 'tied_gradient', which nothing makes on rank 0" in " ".join(
        map(str, verify(unknown))
    )


@pytest.mark.parametrize("stages", [(0,), (1, 0), (0, 2), (0, 0)])
def test_impossible_ties_are_refused(stages: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="tied weights must have two or more trained stages, rising"):
        built(tied_layout("1f1b", 1, 2, 1), "1f1b", weights=(TiedWeights(stages, 8),))


def test_context_ranks_are_whole_groups_of_lanes() -> None:
    layout = tied_layout("1f1b", 1, 2, 1, lanes=2)
    tied = Tied(ends_of(layout), ReplicaGrid(context=3))
    with pytest.raises(InputError, match="replicas of 2 ranks are not whole groups of 3 context ranks"):
        build_training_program(layout, get_schedule("1f1b"), {}, methods={"tying": tied})


def tied_groups(context: int, lanes: int = 2) -> tuple[Groups, Ints]:
    tied = Tied((TiedWeights((0, 1), 8),), ReplicaGrid(lanes // context, context))
    [table] = groups(ring_layout(2, 2, (1, 1), lanes=lanes), tied)
    return table.groups, table.table


def test_lanes_with_the_same_weights_add_up_tied_ones_together() -> None:
    lanes, table = tied_groups(1)
    assert lanes == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert table.tolist() == [[0, 1]]
    together, table = tied_groups(2)
    assert [sorted(group) for group in together] == [list(range(8))]
    assert table.tolist() == [[0, 0]]
    halves, table = tied_groups(2, lanes=4)
    assert [sorted(group) for group in halves] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert table.tolist() == [[0, 1, 0, 1]]
