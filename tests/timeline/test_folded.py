"""Equal ranks: they are in one group if, and only if, they do the same at the same times."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import training_program
from timeline.timelines import timeline_of, unit_durations

from weft.timeline.folded import folded_ranks, leading_rows
from weft.timeline.timeline import Timeline


def work_of(timeline: Timeline, rank: int) -> list[tuple[int, ...]]:
    columns = (timeline.start_ns, timeline.end_ns, timeline.kind, timeline.stage)
    rows = np.stack(columns, axis=1)[timeline.rank == rank]
    return sorted(map(tuple, rows.tolist()))


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_groups_are_the_ranks_of_equal_work(devices: int, replicas: int, batches: int, late: bool) -> None:
    program = training_program("1f1b", devices, devices, (batches,) * replicas)
    timeline = timeline_of(program, unit_durations(program, 1, 2))
    if late:
        timeline.end_ns[timeline.rank == timeline.rank.max()] += 1
    folded = folded_ranks(timeline)
    assert sorted(rank for group in folded for rank in group) == np.unique(timeline.rank).tolist()
    assert [group[0] for group in folded] == sorted(group[0] for group in folded)
    for group in folded:
        assert all(work_of(timeline, rank) == work_of(timeline, group[0]) for rank in group)
    works = [work_of(timeline, group[0]) for group in folded]
    assert all(one not in works[:place] for place, one in enumerate(works))
    leading = leading_rows(timeline)
    first = {rank: group[0] for group in folded for rank in group}
    assert timeline.rank[leading].tolist() == [first[rank] for rank in timeline.rank.tolist()]
    for name in ("kind", "stage", "start_ns", "end_ns"):
        column = getattr(timeline, name)
        assert (column[leading] == column).all()
