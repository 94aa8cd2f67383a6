"""Flat gradients: every element has one place and one owner, and stages take turns without mixing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.run.state.bucket import VECTOR_ELEMENTS, FlatLayout, make_buckets
from weft.run.streams import THERE, Value

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=6)


def module_of(shapes: list[list[int]]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def layout_of(shapes: list[list[int]], shards: int = 1) -> FlatLayout:
    return FlatLayout.of(module_of(shapes), shards)


@given(shapes=SHAPES, shards=st.integers(1, 7))
def test_every_element_has_one_place_and_one_owner(shapes: list[list[int]], shards: int) -> None:
    layout = layout_of(shapes, shards)
    sizes = [parameter.numel() for parameter in layout.parameters]
    assert layout.length % shards == 0
    if shards == 1:
        assert layout.length == sum(sizes)
    else:
        assert 0 <= layout.length - sum(sizes) < VECTOR_ELEMENTS * (len(sizes) + shards)
        assert [start % VECTOR_ELEMENTS for start in layout.starts] == [0] * len(sizes)
        assert layout.length // shards % VECTOR_ELEMENTS == 0
    flat = torch.arange(layout.length)
    share = layout.length // shards
    assert [layout.share(place) for place in range(shards)] == [
        slice(place * share, (place + 1) * share) for place in range(shards)
    ]
    owned = [
        (index, element, begins + element)
        for place in range(shards)
        for index, start, end in layout.within(place * share, (place + 1) * share)
        for begins in [layout.starts[index]]
        for element in range(start, end)
        if place * share <= begins + element < (place + 1) * share
    ]
    expected = [
        (index, element, int(value))
        for index, view in enumerate(layout.views(flat))
        for element, value in enumerate(view.flatten())
    ]
    assert owned == expected


def test_frozen_and_tied_parameters_take_no_room_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module[2].requires_grad_(requires_grad=False)
    apart = FlatLayout.of(module, apart=[module[0].bias])
    assert [id(one) for one in apart.parameters] == [id(module[0].weight), id(module[1].bias)]


@given(
    shapes=st.lists(SHAPES.filter(bool), min_size=1, max_size=5),
    buffers=st.integers(1, 3),
    turns=st.lists(st.integers(0, 4), max_size=12),
)
def test_stages_that_share_a_buffer_never_mix(
    shapes: list[list[list[int]]], buffers: int, turns: list[int]
) -> None:
    """Each turn adds one to a stage's gradients; another stage takes the buffer after they were taken out."""
    layouts = {stage: layout_of(one) for stage, one in enumerate(shapes)}
    buckets = make_buckets(layouts, buffers, torch.float32)
    storages = {bucket.flat.untyped_storage().data_ptr() for bucket in buckets.values()}
    assert len(storages) == min(buffers, len(shapes))
    holds = {
        stage % buffers: stage for stage in layouts if len(range(stage % buffers, len(shapes), buffers)) == 1
    }
    added = dict.fromkeys(layouts, 0)
    emptied = THERE
    for stage in (turn % len(shapes) for turn in turns):
        former = holds.get(stage % buffers)
        if former is not None and former != stage:
            assert (buckets[former].flat == added[former]).all()
            buckets[former].hand_back()
            buckets[former].buffer.emptied = emptied = Value()
            assert all(parameter.grad is None for parameter in layouts[former].parameters)
            added[former] = 0
        if former not in (None, stage):
            # Work that makes gradients of this stage follows the work that took out those of the other.
            assert buckets[stage].buffer.emptied is emptied
        buckets[stage].claim()
        holds[stage % buffers] = stage
        for parameter in layouts[stage].parameters:
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            parameter.grad += 1
        added[stage] += 1
        assert (buckets[stage].flat == added[stage]).all()


def test_a_buffer_that_is_held_is_not_taken() -> None:
    buckets = make_buckets({stage: layout_of([[2]]) for stage in range(2)}, 1, torch.float32)
    buckets[0].claim()
    with pytest.raises(AssertionError, match="empties the buffer before another stage takes it"):
        buckets[1].claim()
    with pytest.raises(AssertionError, match="hands back the buffer that it holds"):
        buckets[1].hand_back()
