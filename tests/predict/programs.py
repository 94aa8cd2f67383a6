"""Small programs written by hand, random ones, and costs for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from weft.methods.sharding.kinds import REDUCE
from weft.predict.costs import Costs
from weft.program.kinds import BACKWARD, FORWARD, SEND_ACTIVATION
from weft.program.program import NONE, Columns, Edges, Obligations, Program

Row = tuple[int, int, int]
Edge = tuple[int, int, int]


def by_hand(
    rows: Sequence[Row],
    edges: Sequence[Edge],
    *,
    groups: tuple[tuple[int, ...], ...] = (),
    iteration: Sequence[int] | None = None,
    steps_per_cycle: int = 1,
) -> Program:
    """`rows` are (rank, kind, stage), sorted by rank; a collective belongs to group 0."""
    rank, kind, stage = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    return Program(
        ranks=int(rank.max()) + 1,
        steps_per_cycle=steps_per_cycle,
        columns=Columns.of(
            len(rows),
            kind=kind,
            stage=stage,
            rank=rank,
            # Those who meet are at the same micro-batch, or at none.
            micro_batch=np.where(kind == REDUCE, NONE, np.arange(len(rows))),
            iteration=np.zeros(len(rows)) if iteration is None else iteration,
            group=np.where(kind == REDUCE, 0, -1),
            peer=np.where(kind == SEND_ACTIVATION, (rank + 1) % (rank.max() + 1), -1),
        ),
        edges=Edges(source=table[:, 0], target=table[:, 1], distance=table[:, 2]),
        groups=groups,
        obligations=Obligations(
            purpose="custom",
            stage_edges=(),
            forward=np.zeros((0, 4), dtype=np.int64),
            backward=np.zeros((0, 4), dtype=np.int64),
            step=np.zeros((0, 3), dtype=np.int64),
            owners={},
        ),
    )


def costs_of(
    program: Program,
    occupancy: npt.ArrayLike,
    latency: npt.ArrayLike = 0,
    *,
    synchronous: bool = False,
    live_bytes: npt.ArrayLike = 0,
    working_bytes: npt.ArrayLike = 0,
    base_bytes: int = 0,
) -> Costs:
    """Costs in seconds of one tick; scalars fill their column."""

    def column(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return np.broadcast_to(np.asarray(values, dtype=np.int64), (len(program),)).copy()

    return Costs(
        occupancy=column(occupancy),
        latency=column(latency),
        tick_s=1.0,
        synchronous=np.full(program.ranks, synchronous),
        live_bytes=column(live_bytes),
        working_bytes=column(working_bytes),
        base_bytes=np.full(program.ranks, base_bytes, dtype=np.int64),
    )


@st.composite
def random_programs(draw: st.DrawFn) -> Program:
    """Programs without circles: edges of one cycle go from a row to one that its rank issues later, or to
    one issued later by another rank's place in its own list; others go to later cycles."""
    ranks, length = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    kinds = (FORWARD, BACKWARD, SEND_ACTIVATION)
    rows = [
        (rank, draw(st.sampled_from(kinds)), draw(st.integers(0, 2)))
        for rank in range(ranks)
        for _ in range(length)
    ]
    row = st.integers(0, len(rows) - 1)
    edges = []
    for source, target in draw(st.lists(st.tuples(row, row), max_size=20)):
        later = source % length < target % length
        edges.append((source, target, 0 if later else draw(st.integers(1, 2))))
    return by_hand(rows, edges)
