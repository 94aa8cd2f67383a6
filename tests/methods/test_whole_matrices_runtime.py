"""Laws: ranks that share a stage complete its matrices after its gradient is whole and before it steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, schedule_layout
from torch import nn

from weft.methods.tying.program import TiedWeights
from weft.methods.whole_matrices.kinds import NAME, WHOLE_MATRICES
from weft.methods.whole_matrices.program import Completed
from weft.methods.whole_matrices.runtime import complete
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.checks.report import name
from weft.program.kinds import STEP
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule
from weft.program.verify import require_valid, verify
from weft.run.state.stepped import Piece
from weft.run.state.whole_matrices import WholeMatricesOptimizer

ORDERS = (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2), ("zb-v", 2))
BYTES = 96


def built(
    order: tuple[str, int],
    pipelines: int,
    *,
    sharding: str = "zero-1",
    island: int | None = None,
    norm: bool = False,
    tied: bool = False,
    completes: bool = True,
) -> Program:
    schedule, loops = order
    layout = schedule_layout(schedule, 2, 2 * loops, (4,) * pipelines)
    weights = [TiedWeights((0, 2 * loops - 1), 96)] if tied else []
    methods = asked(sharding, norm=norm, tied=weights, island=island)
    if completes:
        methods[NAME] = Completed((BYTES,) * len(layout.stages), island)
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


def rows_of(program: Program) -> np.ndarray:
    return np.flatnonzero(program.columns.kind == WHOLE_MATRICES)


@given(
    order=st.sampled_from(ORDERS),
    pipelines=st.sampled_from([1, 2, 3]),
    sharding=st.sampled_from(["zero-1", "zero-2", "zero-3"]),
    norm=st.booleans(),
)
def test_every_step_follows_the_exchange_of_the_ranks_that_share_its_stage(
    order: tuple[str, int], pipelines: int, sharding: str, norm: bool
) -> None:
    program = built(order, pipelines, sharding="zero-0" if pipelines == 1 else sharding, norm=norm)
    require_valid(program)
    columns, rows = program.columns, rows_of(program)
    steps = np.flatnonzero(columns.kind == STEP)
    assert rows.tolist() == ([] if pipelines == 1 else (steps - 1).tolist())
    assert (columns.stage[rows] == columns.stage[rows + 1]).all()
    assert (columns.bytes[rows] == 2 * BYTES).all()


def test_islands_exchange_apart() -> None:
    program = built(("1f1b", 1), 4, island=2)
    require_valid(program)
    groups = {program.groups[group] for group in program.columns.group[rows_of(program)].tolist()}
    assert sorted(map(len, groups)) == [2, 2, 2, 2]


def test_nothing_else_of_a_program_changes() -> None:
    exchanging, plain = (built(("1f1b", 1), 2, completes=one, tied=True) for one in (True, False))
    kept = exchanging.columns.kind != WHOLE_MATRICES
    assert np.array_equal(exchanging.ids[kept], plain.ids)
    assert exchanging.obligations.methods.keys() - plain.obligations.methods.keys() == {NAME}


def test_an_evaluation_exchanges_nothing() -> None:
    layout = schedule_layout("1f1b", 2, 2, (4, 4))
    program = build_evaluation_program(layout, methods={NAME: Completed((BYTES, BYTES))})
    assert not len(rows_of(program))


@pytest.mark.parametrize("norm", [False, True])
def test_an_exchange_needs_what_a_step_needs(norm: bool) -> None:
    program = built(("zb-h1", 1), 2, norm=norm, tied=True)
    edges, kind = program.edges, program.columns.kind
    either = (kind[edges.source] == WHOLE_MATRICES) | (kind[edges.target] == WHOLE_MATRICES)
    for dropped in np.flatnonzero(either).tolist():
        kept = np.arange(len(edges)) != dropped
        without = Edges(source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept])
        problems = " ".join(map(str, verify(replace(program, edges=without))))
        ends = edges.source[dropped], edges.target[dropped]
        source, target = (name(program, int(row)) for row in ends)
        assert f"{target} does not wait for {source}" in problems


def test_an_exchange_among_other_ranks_is_refused() -> None:
    program = built(("1f1b", 1), 4, island=2)
    columns = program.columns
    group = columns.group.copy()
    rows = rows_of(program)
    group[rows] = group[rows[::-1]]
    other = replace(program, columns=replace(columns, group=group))
    assert "WM0 does not meet the ranks that share its stage" in " ".join(map(str, verify(other)))


class Doubling(WholeMatricesOptimizer):
    """Adds to each element its whole matrix's sum."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, {"orthogonalises": True})

    def begin(self) -> None:
        """There is no momentum."""

    def complete(self, matrix: torch.Tensor) -> None:
        matrix.add_(matrix.sum())

    def finish(self) -> None:
        """Nobody steps."""


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
def test_pieces_get_their_parts_of_whole_updates(sizes: list[tuple[int, int, bool]], ranks: int) -> None:
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
        pieces, stepped = [], []
        for start, parameter, (*_, is_matrix) in zip(starts, parameters, sizes, strict=False):
            first = max(place * length - start, 0)
            last = min((place + 1) * length - start, parameter.numel())
            if first < last:
                piece = nn.Parameter(torch.zeros(last - first, dtype=torch.float64))
                piece.grad = flat[start + first : start + last]
                pieces.append(Piece(parameter, start, first, last, piece))
                stepped += [piece] * is_matrix
        optimizer = Doubling(stepped or [nn.Parameter(torch.zeros(1))])
        own = flat[place * length : (place + 1) * length]
        try:
            complete(optimizer, pieces, own, Rank(place, ranks, sent, barrier))  # type: ignore[arg-type]
        except Exception:
            # Whoever fails lets nobody wait.
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    assert torch.equal(flat, expected)
