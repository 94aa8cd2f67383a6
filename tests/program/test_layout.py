"""Layouts: global numbering, places of ranks, and everything that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from program.layouts import ring_layout

from weft.errors import InputError
from weft.program.layout import PipelineLayout, StageLayout


def problems(layout: PipelineLayout) -> str:
    with pytest.raises(InputError) as caught:
        layout.require_valid()
    return str(caught.value)


def test_micro_batches_are_numbered_over_the_global_batch() -> None:
    assert ring_layout(1, 1, (3, 1, 2)).first_micro_batch == (0, 3, 4)


def test_ranks_by_replica_device_and_lane() -> None:
    layout = ring_layout(2, 3, (1, 1), lanes=2)
    layout.require_valid()
    assert layout.placement.tolist() == [0, 1, 0]
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
    assert "stage 1: replica 0 has 2 tensor ranks; all must have 1" in text
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
