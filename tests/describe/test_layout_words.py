"""Layouts in the words of other programs: the field's names, and nothing that a layout does not decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.layout import Layout
from weft.describe.layout_words import differences, layout_words

PLAIN = Layout(pp=1, dp=8, loops=1, micro_batch_size=4, schedule="1f1b")


@pytest.mark.parametrize(
    ("layout", "micro_batches", "words"),
    [
        (PLAIN, 1, "DDP over 8, micro-batches of 4 samples"),
        (
            replace(PLAIN, dp=1, micro_batch_size=1),
            2,
            "one replica, micro-batches of 1 sample, 2 accumulation steps",
        ),
        (
            replace(PLAIN, sharding="zero-3", tp=2, loops=4, schedule="depth-first", recompute="full"),
            8,
            "FSDP over 8 (ZeRO-3), tp 2, micro-batches of 4 samples, 8 accumulation steps, "
            "depth-first order, 4 buckets, recomputation full",
        ),
        (
            replace(PLAIN, sharding="zero-3", island=4),
            1,
            "HSDP: FSDP over 4, 2 times, micro-batches of 4 samples",
        ),
        (
            replace(PLAIN, pp=4, loops=2, schedule="depth-first", sharding="zero-1", loss="chunked"),
            8,
            "data parallel over 8 with ZeRO-1, pp 4, 8 micro-batches of 4 samples, interleaved 1F1B order, "
            "2 stages per device, loss in chunks of tokens",
        ),
        (replace(PLAIN, pp=2, dp=1), 1, "one replica, pp 2, 1 micro-batch of 4 samples, 1F1B order"),
    ],
)
def test_layouts_have_the_names_of_the_field(layout: Layout, micro_batches: int, words: str) -> None:
    assert layout_words(layout, [micro_batches] * layout.dp) == words


def test_unequal_shares_are_counted() -> None:
    layout = replace(PLAIN, dp=3)
    assert layout_words(layout, (3, 3, 1)) == "DDP over 3, 3+3+1 micro-batches of 4 samples"


layouts = st.builds(
    Layout,
    pp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 4)),
    tp=st.sampled_from((1, 2)),
    loops=st.just(1),
    micro_batch_size=st.sampled_from((1, 2)),
    schedule=st.sampled_from(("1f1b", "gpipe")),
    sharding=st.sampled_from(("zero-0", "zero-3")),
    recompute=st.sampled_from(("none", "full")),
    sync=st.sampled_from(("dense", "sdp4bit")),
)


@given(one=layouts, other=layouts)
def test_differences_name_what_differs_and_nothing_else(one: Layout, other: Layout) -> None:
    said = differences(one, other).split(", ") if differences(one, other) else []
    pairs = {
        f"micro-batch size {one.micro_batch_size}": one.micro_batch_size != other.micro_batch_size,
        one.sharding: one.sharding != other.sharding,
        f"recompute {one.recompute}": one.recompute != other.recompute,
        f"sync {one.sync}": one.sync != other.sync,
        # Without a pipeline, the order of micro-batches only tunes a plan.
        one.schedule: one.pp > 1 and one.schedule != other.schedule,
    }
    degrees = [axis for axis in ("pp", "dp", "tp") if getattr(one, axis) != getattr(other, axis)]
    if degrees:
        assert said[0] == " x ".join(f"{axis} {getattr(one, axis)}" for axis in degrees)
    assert sorted(said[bool(degrees) :]) == sorted(text for text, differs in pairs.items() if differs)
