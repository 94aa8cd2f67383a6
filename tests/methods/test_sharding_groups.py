"""Groups of ranks: holders of the same weights, islands and their counterparts."""

from __future__ import annotations

import pytest
from program.layouts import asked, placed_layout, ring_layout

from weft.errors import InputError
from weft.methods.sharding.groups import group_tables
from weft.program.arrays import Ints
from weft.program.build import build_training_program
from weft.program.layout import PipelineLayout
from weft.program.program import Groups
from weft.program.schedules import get_schedule


def inside(layout: PipelineLayout, island: int | None = None) -> tuple[Groups, Ints]:
    one, _ = group_tables(layout, island or layout.replicas)
    return one.groups, one.table


def across(layout: PipelineLayout, island: int | None = None) -> tuple[Groups, Ints]:
    _, other = group_tables(layout, island or layout.replicas)
    return other.groups, other.table


def test_all_holders_of_a_stage_form_a_group_in_each_lane() -> None:
    """Stage s and stage 3 - s have the same holders."""
    groups, table = inside(placed_layout([[0, 1, 2, 3], [3, 2, 1, 0]], (4, 4), lanes=2))
    assert groups == ((0, 12, 2, 14), (1, 13, 3, 15), (4, 8, 6, 10), (5, 9, 7, 11))
    assert table[:, 0].tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert (table == table[:, :1]).all()


def test_one_path_has_a_group_for_each_device_and_lane() -> None:
    groups, table = inside(ring_layout(2, 3, (1, 1), lanes=2))
    assert groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert (table == table[:, :1]).all()


def test_islands_are_neighbours_in_rank_and_meet_at_the_same_place() -> None:
    layout = ring_layout(2, 2, (1, 1, 1, 1), lanes=2)
    groups, table = inside(layout, 2)
    assert groups[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table[0].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    groups, table = across(layout, 2)
    assert groups[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert table[0].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_the_paths_of_two_devices_are_different_islands() -> None:
    """Replicas go pipeline by pipeline; those of one device are neighbours in rank."""
    layout = placed_layout([[0, 1], [1, 0]], (2, 2, 2))
    first, second = (inside(layout, 3)[1][stage, :, 0].tolist() for stage in (0, 1))
    assert inside(layout, 3)[0] == ((0, 1, 2), (3, 4, 5))
    assert first == [0, 1, 0, 1, 0, 1]
    assert second == [1, 0, 1, 0, 1, 0]
    assert across(layout, 3)[0] == ((0, 3), (1, 4), (2, 5))


def test_one_island_is_none() -> None:
    layout = ring_layout(2, 2, (1, 1, 1, 1))
    assert inside(layout, 4)[0] == inside(layout)[0]
    for island in (None, 4):
        groups, table = across(layout, island)
        assert groups == ()
        assert (table == -1).all()


def test_islands_are_whole() -> None:
    with pytest.raises(InputError, match="layout: 4 replicas cannot make whole islands of 3"):
        build_training_program(
            ring_layout(2, 2, (1, 1, 1, 1)), get_schedule("1f1b"), {}, methods=asked("zero-1", island=3)
        )
