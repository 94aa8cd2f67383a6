"""Layouts that no program can be built for: everything wrong is said, in one line each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from program.layouts import dealt_layout, placed_layout, ring_layout

from weft.errors import InputError
from weft.program.layout import PipelineLayout, StageLayout


def problems(layout: PipelineLayout) -> str:
    with pytest.raises(InputError) as caught:
        layout.require_valid()
    return str(caught.value)


def test_everything_wrong_is_listed_at_once() -> None:
    layout = PipelineLayout(
        stages=(StageLayout(replicas=((0,), (1, 3))), StageLayout(replicas=((2, 2),))),
        micro_batches=(1, 0),
        message_bytes={(1, 0): 8},
    )
    text = problems(layout)
    assert "stage 1: has 1 replicas, but there are 2 pipelines" in text
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


def test_a_device_holds_a_stage_once() -> None:
    layout = placed_layout([[0, 1, 2], [2, 1, 0]], (2,))
    assert problems(layout) == "stage 1: has two paths on one device; a device holds a stage once"


def test_paths_share_a_pipeline_equally() -> None:
    layout = placed_layout([[0, 1], [1, 0]], (2, 2))
    text = problems(replace(layout, micro_batches=(1, 2, 1, 1)))
    assert text == "pipeline 0: its paths must have equal micro-batches, not [1, 2]"
    assert "4 replicas cannot make whole pipelines of 3 paths each" in problems(replace(layout, paths=3))
    assert "4 replicas cannot make whole pipelines of 0 paths each" in problems(replace(layout, paths=0))


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


def test_lanes_of_one_stage_are_a_multiple_of_those_of_another() -> None:
    text = problems(dealt_layout((1, 1, 1), (1,), lanes=(1, 2, 3)))
    assert text == (
        "stage 2: has replicas of 3 ranks, others have 2; one must be a multiple of the other "
        "(nearest valid: 2)"
    )
