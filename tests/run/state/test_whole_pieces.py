"""Laws: whole tensors of which ranks own ranges are completed once, wherever borders fall."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Barrier
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.run.state.stepped import Piece
from weft.run.state.whole_pieces import complete_pieces


class Rank:
    """One of several ranks in one process, all of which run to an exchange before any of them goes on."""

    def __init__(self, place: int, size: int, sent: list[dict[int, torch.Tensor]], waits: Barrier) -> None:
        self.place, self.size, self._sent, self._waits = place, size, sent, waits

    def all_to_all_rows(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: Sequence[int], given_rows: Sequence[int]
    ) -> None:
        self._sent[self.place] = dict(enumerate(part.clone() for part in given.split(list(given_rows))))
        self._waits.wait()
        for place, room in enumerate(taken.split(list(taken_rows))):
            room.copy_(self._sent[place][self.place])
        self._waits.wait()


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=1, max_size=6),
    ranks=st.integers(1, 5),
)
def test_pieces_get_their_parts_of_whole_results(sizes: list[tuple[int, int, bool]], ranks: int) -> None:
    """Wherever borders fall, also several in one matrix, and between what is no matrix."""
    parameters = [nn.Parameter(torch.zeros(rows, columns)) for rows, columns, _ in sizes]
    starts = [0, *accumulate(one.numel() for one in parameters)]
    length = -(-starts[-1] // ranks)
    flat = torch.arange(1.0, 1.0 + ranks * length, dtype=torch.float64)
    expected = flat.clone()
    for start, (rows, columns, is_matrix) in zip(starts, sizes, strict=False):
        if is_matrix:
            expected[start : start + rows * columns] += flat[start : start + rows * columns].sum()
    barrier, sent = Barrier(ranks), [{} for _ in range(ranks)]

    def run(place: int) -> None:
        pieces: list[Piece] = []
        for start, parameter, (*_, is_matrix) in zip(starts, parameters, sizes, strict=False):
            first = max(place * length - start, 0)
            last = min((place + 1) * length - start, parameter.numel())
            if first < last:
                piece = nn.Parameter(torch.zeros(last - first, dtype=torch.float64))
                piece.grad = flat[start + first : start + last]
                pieces += [Piece(parameter, start, first, last, piece)] * is_matrix
        own = flat[place * length : (place + 1) * length]
        try:
            group: Any = Rank(place, ranks, sent, barrier)
            complete_pieces(pieces, own, group, lambda _, whole: whole.add_(whole.sum()))
        except Exception:
            # Whoever fails lets nobody wait.
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    assert torch.equal(flat, expected)
