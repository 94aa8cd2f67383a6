"""Layouts and partial layouts: one vocabulary, there and back."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.layout import OPEN, Layout, PartialLayout, Pins
from weft.describe.plan import AXES, RECOMPUTES

COUNTS = st.integers(1, 8)
PLAIN = Layout(pp=1, dp=1, loops=1, micro_batch_size=1, schedule="1f1b")
# Of a layout those that nobody can decide before a search.
SEARCH_ONLY = {
    "methods",
    "options",
    "sync",
    "sync_options",
    "recompute_per_stage",
    "layers_per_stage",
    "rank_order",
    "micro_batches_per_replica",
}


LOSSES: list[dict[str, Any]] = [
    {},
    {"loss": "fused"},
    {"loss": "chunked"},
    {"loss": "chunked", "loss_chunk_tokens": 64},
]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(COUNTS) for axis in AXES}
    layout = Layout(
        **degrees,
        loops=draw(st.integers(1, 2)),
        micro_batch_size=draw(COUNTS),
        schedule=draw(st.sampled_from(["1f1b", "hybrid"])),
        options=draw(st.sampled_from([{}, {"depth": 2}])),
        sharding=draw(st.sampled_from(["zero-0", "zero-3"])),
        island=draw(st.none() | COUNTS),
        blocking=draw(st.sampled_from([(), ("messages",), ("messages", "reductions")])),
        splits=draw(st.sampled_from([(), (1, 2)])),
        **draw(st.sampled_from(LOSSES)),
        rank_order=draw(st.sampled_from([None, (1, 0)])),
    )
    words = st.sampled_from(RECOMPUTES)
    stages = layout.stages
    return layout.recomputing(draw(words | st.lists(words, min_size=stages, max_size=stages)))


def test_what_can_be_decided_is_named_as_in_the_layout() -> None:
    known = {one.name for one in fields(Layout)}
    assert known - SEARCH_ONLY == set(PartialLayout.model_fields)
    assert set(get_type_hints(Pins)) == set(PartialLayout.model_fields)
    assert set(AXES) <= set(PartialLayout.model_fields)
    assert all(field.description for field in PartialLayout.model_fields.values())


@given(layouts())
def test_all_of_a_layout_that_can_be_decided_gives_it_back(layout: Layout) -> None:
    rest = {name: getattr(layout, name) for name in SEARCH_ONLY - {"recompute_per_stage"}}
    decided = PartialLayout.of(layout)
    assert decided.complete(replace(PLAIN, **rest)) == layout
    assert decided.admit(layout)
    assert OPEN.complete(layout) == layout
    assert OPEN.admit(layout)


@pytest.mark.parametrize("name", PartialLayout.model_fields)
def test_a_layout_without_what_is_decided_is_not_admitted(name: str) -> None:
    other: dict[str, Any] = {
        "schedule": "gpipe",
        "sharding": "zero-1",
        "recompute": "full",
        "blocking": ["messages"],
        "splits": [1, 2],
        "loss": "chunked",
    }
    needed = {"loss": "chunked"} if name == "loss_chunk_tokens" else {}
    decided = PartialLayout(**{**needed, name: other.get(name, 2)})
    assert not decided.admit(replace(PLAIN, **needed))
    assert decided.admit(decided.complete(PLAIN))
    assert decided.given.keys() == {name, *needed}
    assert decided.besides({name}) == needed


def test_an_open_loss_admits_every_loss() -> None:
    decided = PartialLayout(loss="auto", loss_chunk_tokens=64)
    assert decided.given == {}
    assert decided.admit(PLAIN)
    assert decided.admit(replace(PLAIN, loss="chunked", loss_chunk_tokens=64))


def test_a_record_says_what_waits_only_where_something_does() -> None:
    record = replace(PLAIN, cp=2, options={"depth": 2}).record()
    assert list(record) == [
        *("pp", "dp", "tp", "cp", "loops", "micro_batch_size", "schedule", "options"),
        *("sharding", "island", "recompute", "recompute_per_stage"),
    ]
    assert record["cp"] == 2
    assert record["options"] == {"depth": 2}
    assert replace(PLAIN, blocking=("messages",)).record()["blocking"] == ("messages",)
