"""Layouts: global numbering and places of ranks."""

from __future__ import annotations

from program.layouts import placed_layout, ring_layout


def test_micro_batches_are_numbered_over_the_global_batch() -> None:
    assert ring_layout(1, 1, (3, 1, 2)).first_micro_batch == (0, 3, 4)


def test_ranks_by_replica_device_and_lane() -> None:
    layout = ring_layout(2, 3, (1, 1), lanes=2)
    layout.require_valid()
    assert layout.placement.tolist() == [[0, 1, 0]]
    assert layout.rank_table.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert layout.ranks == 8


def test_two_paths_of_a_pipeline_share_its_ranks() -> None:
    layout = placed_layout([[0, 1, 2, 3], [3, 2, 1, 0]], (4, 6), lanes=2)
    layout.require_valid()
    assert layout.pipelines == 2
    assert layout.replicas == 4
    assert layout.micro_batches == (2, 2, 3, 3)
    assert layout.pipeline_micro_batches == (4, 6)
    assert layout.first_micro_batch == (0, 2, 4, 7)
    assert layout.placement.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert layout.rank_table[1].tolist() == [[2, 3], [6, 7], [10, 11], [14, 15]]
