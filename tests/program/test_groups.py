"""Groups of ranks: holders of the same weights, islands and their counterparts, copies of tied weights."""

from __future__ import annotations

from dataclasses import replace

from program.layouts import placed_layout, ring_layout

from weft.program.groups import across_group_table, group_table, tied_group_table
from weft.program.layout import PipelineLayout, TiedWeights


def test_all_holders_of_a_stage_form_a_group_in_each_lane() -> None:
    """Stage s and stage 3 - s have the same holders."""
    groups, table = group_table(placed_layout([[0, 1, 2, 3], [3, 2, 1, 0]], (4, 4), lanes=2))
    assert groups == ((0, 12, 2, 14), (1, 13, 3, 15), (4, 8, 6, 10), (5, 9, 7, 11))
    assert table[:, 0].tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert (table == table[:, :1]).all()


def test_one_path_has_a_group_for_each_device_and_lane() -> None:
    groups, table = group_table(ring_layout(2, 3, (1, 1), lanes=2))
    assert groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert (table == table[:, :1]).all()


def test_islands_are_neighbours_in_rank_and_meet_at_the_same_place() -> None:
    layout = replace(ring_layout(2, 2, (1, 1, 1, 1), lanes=2), island=2)
    layout.require_valid()
    assert layout.islands == 2
    groups, table = group_table(layout)
    assert groups[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table[0].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    groups, table = across_group_table(layout)
    assert groups[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert table[0].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_the_paths_of_two_devices_are_different_islands() -> None:
    """Replicas go pipeline by pipeline; those of one device are neighbours in rank."""
    layout = replace(placed_layout([[0, 1], [1, 0]], (2, 2, 2)), island=3)
    first, second = (group_table(layout)[1][stage, :, 0].tolist() for stage in (0, 1))
    assert group_table(layout)[0] == ((0, 1, 2), (3, 4, 5))
    assert first == [0, 1, 0, 1, 0, 1]
    assert second == [1, 0, 1, 0, 1, 0]
    assert across_group_table(layout)[0] == ((0, 3), (1, 4), (2, 5))


def test_one_island_is_none() -> None:
    layout = ring_layout(2, 2, (1, 1, 1, 1))
    one = replace(layout, island=4)
    assert group_table(one)[0] == group_table(layout)[0]
    for known in (layout, one):
        groups, table = across_group_table(known)
        assert groups == ()
        assert (table == -1).all()


def tied_over(context_parallel: int, lanes: int = 2) -> PipelineLayout:
    layout = ring_layout(2, 2, (1, 1), lanes=lanes)
    return replace(layout, tied=(TiedWeights((0, 1), 8),), context_parallel=context_parallel)


def test_lanes_with_the_same_weights_add_up_tied_ones_together() -> None:
    lanes, table = tied_group_table(tied_over(1))
    assert lanes == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert table.tolist() == [[0, 1]]
    together, table = tied_group_table(tied_over(2))
    assert [sorted(group) for group in together] == [list(range(8))]
    assert table.tolist() == [[0, 0]]
    halves, table = tied_group_table(tied_over(2, lanes=4))
    assert [sorted(group) for group in halves] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert table.tolist() == [[0, 1, 0, 1]]
