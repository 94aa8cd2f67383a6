"""Layouts: global numbering, places of ranks, and everything that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from program.layouts import placed_layout, ring_layout

from weft.errors import InputError
from weft.program.layout import PipelineLayout, StageLayout, TiedWeights


def problems(layout: PipelineLayout) -> str:
    with pytest.raises(InputError) as caught:
        layout.require_valid()
    return str(caught.value)


def test_micro_batches_are_numbered_over_the_global_batch() -> None:
    assert ring_layout(1, 1, (3, 1, 2)).first_micro_batch == (0, 3, 4)


def test_ranks_by_replica_device_and_lane() -> None:
    layout = ring_layout(2, 3, (1, 1), lanes=2)
    layout.require_valid()
    assert layout.placement.tolist() == [[0, 1, 0]]
    assert layout.rank_table().tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert layout.ranks == 8


def test_everything_wrong_is_listed_at_once() -> None:
    layout = PipelineLayout(
        stages=(StageLayout(replicas=((0,), (1,))), StageLayout(replicas=((2, 2),))),
        micro_batches=(1, 0),
        message_bytes={(1, 0): 8},
    )
    text = problems(layout)
    assert "stage 1: has 1 replicas, but there are 2 pipelines" in text
    assert "stage 1: replica 0 has 2 ranks; all must have 1" in text
    assert "stage 1: replica 0: ranks [2, 2] must be different and not negative" in text
    assert "pipeline replica 1: has 0 micro-batches" in text
    assert "edge (1, 0) must go from a stage to a later one of 2" in text


def test_a_rank_has_one_place_in_all_pipelines() -> None:
    layout = ring_layout(2, 2, (1, 1))
    stolen = replace(layout.stages[1], replicas=((2,), (0,)))
    assert "rank 0 already has another place" in problems(replace(layout, stages=(layout.stages[0], stolen)))


def test_stages_share_a_device_in_all_pipelines_or_in_none() -> None:
    layout = PipelineLayout(
        stages=(StageLayout(replicas=((0,), (1,))), StageLayout(replicas=((0,), (2,)))),
        micro_batches=(1, 1),
        message_bytes={(0, 1): 8},
    )
    assert "stages that share a device in one pipeline must share it in all" in problems(layout)


def test_two_paths_of_a_pipeline_share_its_ranks() -> None:
    layout = placed_layout([[0, 1, 2, 3], [3, 2, 1, 0]], (4, 6), lanes=2)
    layout.require_valid()
    assert layout.pipelines == 2
    assert layout.replicas == 4
    assert layout.micro_batches == (2, 2, 3, 3)
    assert layout.pipeline_micro_batches == (4, 6)
    assert layout.first_micro_batch == (0, 2, 4, 7)
    assert layout.placement.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert layout.rank_table()[1].tolist() == [[2, 3], [6, 7], [10, 11], [14, 15]]


def test_all_holders_of_a_stage_form_a_group_in_each_lane() -> None:
    """Stage s and stage 3 - s have the same holders."""
    groups, table = placed_layout([[0, 1, 2, 3], [3, 2, 1, 0]], (4, 4), lanes=2).group_table()
    assert groups == ((0, 12, 2, 14), (1, 13, 3, 15), (4, 8, 6, 10), (5, 9, 7, 11))
    assert table[:, 0].tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert (table == table[:, :1]).all()


def test_one_path_has_a_group_for_each_device_and_lane() -> None:
    groups, table = ring_layout(2, 3, (1, 1), lanes=2).group_table()
    assert groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert (table == table[:, :1]).all()


def test_islands_are_neighbours_in_rank_and_meet_at_the_same_place() -> None:
    layout = replace(ring_layout(2, 2, (1, 1, 1, 1), lanes=2), island=2)
    layout.require_valid()
    assert layout.islands == 2
    groups, table = layout.group_table()
    assert groups[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table[0].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    groups, table = layout.across_group_table()
    assert groups[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert table[0].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_the_paths_of_two_devices_are_different_islands() -> None:
    """Replicas go pipeline by pipeline; those of one device are neighbours in rank."""
    layout = replace(placed_layout([[0, 1], [1, 0]], (2, 2, 2)), island=3)
    first, second = (layout.group_table()[1][stage, :, 0].tolist() for stage in (0, 1))
    assert layout.group_table()[0] == ((0, 1, 2), (3, 4, 5))
    assert first == [0, 1, 0, 1, 0, 1]
    assert second == [1, 0, 1, 0, 1, 0]
    assert layout.across_group_table()[0] == ((0, 3), (1, 4), (2, 5))


def test_one_island_is_none() -> None:
    layout = ring_layout(2, 2, (1, 1, 1, 1))
    one = replace(layout, island=4)
    assert one.group_table()[0] == layout.group_table()[0]
    for known in (layout, one):
        groups, table = known.across_group_table()
        assert groups == ()
        assert (table == -1).all()


def test_islands_are_whole() -> None:
    layout = replace(ring_layout(2, 2, (1, 1, 1, 1)), island=3)
    assert problems(layout) == "layout: 4 replicas are not whole islands of 3"


def test_a_device_holds_a_stage_once() -> None:
    layout = placed_layout([[0, 1, 2], [2, 1, 0]], (2,))
    assert problems(layout) == "stage 1: has two paths on one device; a device holds a stage once"


def test_paths_share_a_pipeline_equally() -> None:
    layout = placed_layout([[0, 1], [1, 0]], (2, 2))
    text = problems(replace(layout, micro_batches=(1, 2, 1, 1)))
    assert text == "pipeline 0: its paths must have equal micro-batches, not [1, 2]"
    assert "4 replicas are not whole pipelines of 3 paths each" in problems(replace(layout, paths=3))
    assert "4 replicas are not whole pipelines of 0 paths each" in problems(replace(layout, paths=0))


def test_a_rank_has_one_place_on_all_paths() -> None:
    layout = placed_layout([[0, 1], [1, 0]], (2, 2))
    first, second = layout.stages
    stolen = replace(second, replicas=(*second.replicas[:3], (0,)))
    assert "rank 0 already has another place" in problems(replace(layout, stages=(first, stolen)))


@pytest.mark.parametrize(
    "layout",
    [
        PipelineLayout(stages=(), micro_batches=(1,), message_bytes={}),
        PipelineLayout(stages=(StageLayout(replicas=()),), micro_batches=(), message_bytes={}),
        PipelineLayout(stages=(StageLayout(replicas=()),), micro_batches=(1,), message_bytes={}),
        PipelineLayout(stages=(StageLayout(replicas=((),)),), micro_batches=(1,), message_bytes={}),
    ],
)
def test_an_empty_layout_is_refused(layout: PipelineLayout) -> None:
    assert problems(layout)


def tied_over(context_parallel: int, lanes: int = 2) -> PipelineLayout:
    layout = ring_layout(2, 2, (1, 1), lanes=lanes)
    return replace(layout, tied=(TiedWeights((0, 1), 8),), context_parallel=context_parallel)


def test_lanes_with_the_same_weights_add_up_tied_ones_together() -> None:
    lanes, table = tied_over(1).tied_group_table()
    assert lanes == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert table.tolist() == [[0, 1]]
    together, table = tied_over(2).tied_group_table()
    assert [sorted(group) for group in together] == [list(range(8))]
    assert table.tolist() == [[0, 0]]
    halves, table = tied_over(2, lanes=4).tied_group_table()
    assert [sorted(group) for group in halves] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert table.tolist() == [[0, 1, 0, 1]]


def test_context_ranks_are_whole_groups_of_lanes() -> None:
    assert "replicas of 2 ranks are not whole groups of 3 context ranks" in problems(tied_over(3))
