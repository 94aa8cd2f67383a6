"""Timelines on terminals: what fits, what is said without colours and with them."""

from __future__ import annotations

import re

from cli.tables.printed import text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from web.samples import breadth_first, without_rows

from weft.cli.output import TimelinePicture


@settings(max_examples=25)
@given(
    devices=st.integers(1, 6), loops=st.integers(1, 3), batches=st.integers(1, 12), width=st.integers(40, 200)
)
def test_plain_pictures_are_ascii_and_fit(devices: int, loops: int, batches: int, width: int) -> None:
    lines = text_of(TimelinePicture(breadth_first(devices, loops, batches)), width).splitlines()
    assert all(line.isascii() and len(line.rstrip()) <= width for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == devices


def test_plain_picture_is_exact() -> None:
    picture = TimelinePicture(breadth_first(devices=2, loops=1, micro_batches=2))
    lines = [line.rstrip() for line in text_of(picture, width=45).splitlines()]
    assert lines[:4] == [
        "rank 0 0---1---            0-------1-------",
        "       FFFFFFFF            BBBBBBBBBBBBBBBB",
        "rank 1     0---1---0-------1-------",
        "           FFFFFFFFBBBBBBBBBBBBBBBB",
    ]
    assert lines[-1] == "F forward  B backward"


def test_coloured_picture_shows_the_same_blocks_as_colours() -> None:
    plain = text_of(TimelinePicture(breadth_first()), 120)
    coloured = text_of(TimelinePicture(breadth_first()), 120, colour=True)
    assert "\x1b[" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    first = next(line for line in bare.splitlines() if line.startswith("rank 0"))
    assert re.findall(r"\d+", first)[1:] == re.findall(r"\d+", plain.splitlines()[0])[1:]


def test_many_ranks_are_cut_and_said() -> None:
    assert "and 8 more ranks" in text_of(TimelinePicture(breadth_first(40, 1, 2)))


def test_a_timeline_without_computation_says_so() -> None:
    assert text_of(TimelinePicture(without_rows(breadth_first(1, 1, 1)))).strip() == "nothing was computed"
