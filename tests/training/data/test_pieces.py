"""Laws of pieces: every byte on one side, whole characters, whatever the sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.program.codes import mix
from weft.training.data.pieces import Pieces, block, boundary, cut, held_out, share_bytes


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(1, 64))
def test_the_split_takes_every_byte_once_and_leaves_both_sides_some(sizes: list[int], sequence: int) -> None:
    if sum(sizes) < 2 * (sequence + 1):
        return
    share = share_bytes(np.array(sizes), sequence)
    pieces = cut(np.array(sizes), share)
    for document, size in enumerate(sizes):
        mine = pieces.document == document
        edges = [0, *pieces.end[mine].tolist()]
        assert edges == [*pieces.start[mine].tolist(), size] if size else not mine.any()
        assert not mine.sum() > 1 or pieces.sizes[mine].min() >= share
    apart = held_out(pieces, mix(np.arange(len(pieces), dtype=np.uint64)), share)
    # One piece may be all there is; a corpus that short is refused by its tokens.
    assert apart.sum() == 0 if len(pieces) == 1 else 0 < apart.sum() < len(pieces)


def test_pieces_are_held_out_in_their_order_until_a_share_is_reached() -> None:
    pieces = Pieces(np.arange(5), np.zeros(5, np.int64), np.array([10, 20, 30, 40, 50]))
    order = np.array([4, 3, 0, 1, 2], dtype=np.uint64)
    assert held_out(pieces, order, 30).tolist() == [False, False, True, False, False]
    assert held_out(pieces, order, 31).tolist() == [False, False, True, True, False]
    assert held_out(pieces, order, 10**6).tolist() == [False, True, True, True, True]


@given(st.text(max_size=60), st.integers(1, 9))
def test_blocks_are_whole_characters_and_together_the_document(text: str, share: int) -> None:
    content = text.encode()
    pieces = cut(np.array([len(content)]), share)
    edges = list(zip(pieces.start.tolist(), pieces.end.tolist(), strict=True))
    blocks = [block(content, start, end, first=start == 0, last=end == len(content)) for start, end in edges]
    assert b"".join(blocks) == content
    assert "".join(one.decode() for one in blocks) == text


@given(st.binary(max_size=40), st.integers(1, 9))
def test_blocks_of_any_bytes_are_together_the_document(content: bytes, share: int) -> None:
    pieces = cut(np.array([len(content)]), share)
    edges = zip(pieces.start.tolist(), pieces.end.tolist(), strict=True)
    blocks = [block(content, start, end, first=start == 0, last=end == len(content)) for start, end in edges]
    assert b"".join(blocks) == content


def test_a_border_moves_three_bytes_at_most() -> None:
    assert boundary("a\N{SNOWMAN}".encode(), 2) == 4
    assert boundary(b"\x80" * 10, 2) == 5
    assert boundary(b"ab", 2) == 2
