"""Lanes: the rows of a Timeline grouped by rank and stream, for all its pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, is_compute
from weft.program.program import NONE
from weft.timeline.timeline import Timeline, stream_names


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """One rank's work on one stream; `order` is the stream's place in `stream_names()`."""

    rank: int
    order: int
    stream: str


def lane_table(timelines: Iterable[Timeline]) -> tuple[Lane, ...]:
    """Return the lanes of all the timelines together, sorted by rank and stream."""
    names = stream_names()
    position = {name: order for order, name in enumerate(names)}
    found: set[tuple[int, int]] = set()
    for timeline in timelines:
        pairs = np.unique(np.stack([timeline.rank, timeline.kind]), axis=1).T
        found |= {(int(rank), position[KINDS[int(kind)].stream]) for rank, kind in pairs}
    return tuple(Lane(rank, order, names[order]) for rank, order in sorted(found))


def lane_of_rows(timeline: Timeline, lanes: tuple[Lane, ...]) -> Ints:
    """Return the index in `lanes` of each row's lane, -1 for rows without one; shape (rows,)."""
    names = stream_names()
    order_of_kind = np.array([names.index(kind.stream) for kind in KINDS], dtype=np.int64)
    key = timeline.rank * len(names) + order_of_kind[timeline.kind]
    wanted = np.array([lane.rank * len(names) + lane.order for lane in lanes], dtype=np.int64)
    index = np.minimum(np.searchsorted(wanted, key), max(len(wanted) - 1, 0))
    return np.where(wanted[index] == key, index, NONE) if len(wanted) else np.full(len(key), NONE)


def shade_of_rows(timeline: Timeline) -> npt.NDArray[np.float64]:
    """Return the darkness of each row, 0 to 1; later stages of a rank are darker, to show loops."""
    shades = np.zeros(len(timeline))
    compute = is_compute(timeline.kind)
    for rank in np.unique(timeline.rank):
        mine = compute & (timeline.rank == rank)
        stages = np.unique(timeline.stage[mine & (timeline.stage != NONE)])
        if len(stages) > 1:
            shades[mine] = np.searchsorted(stages, timeline.stage[mine]) / (len(stages) - 1)
    return shades
