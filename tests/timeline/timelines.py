"""Timelines for tests: a program executed with given durations, by the letter of its queues and edges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.program.program import Program
from weft.timeline.timeline import Timeline


def timeline_of(
    program: Program,
    duration_ns: Callable[[int, int], int],
    *,
    steps: int = 1,
    run: str = "run",
    clock: str = "predicted",
) -> Timeline:
    """Execute `steps` cycles; `duration_ns(row, step)` is how long a row takes in a step."""
    size = len(program)
    start = np.zeros((steps, size), dtype=np.int64)
    end = np.full((steps, size), -1, dtype=np.int64)
    queue = program.queue
    edges = list(
        zip(
            program.edges.source.tolist(),
            program.edges.target.tolist(),
            program.edges.distance.tolist(),
            strict=True,
        )
    )
    free = np.zeros(int(queue.max()) + 1, dtype=np.int64)
    for step in range(steps):
        waiting = list(range(size))
        while waiting:
            left = []
            busy: set[int] = set()
            for row in waiting:
                sources = [(step - d, s) for s, t, d in edges if t == row and step - d >= 0]
                if queue[row] in busy or any(end[source] < 0 for source in sources):
                    busy.add(int(queue[row]))
                    left.append(row)
                    continue
                start[step, row] = max([free[queue[row]], *(end[source] for source in sources)])
                end[step, row] = free[queue[row]] = start[step, row] + duration_ns(row, step)
            assert len(left) < len(waiting)
            waiting = left
    columns = program.columns
    names = ("kind", "stage", "micro_batch", "rank", "group", "bytes")
    return Timeline(
        run=run,
        plan_id="0123456789abcdef",
        clock=clock,
        step=np.repeat(np.arange(steps), size),
        id=np.tile(program.ids, steps),
        position=np.tile(np.arange(size), steps),
        stream=np.tile(program.stream, steps),
        posted_ns=start.ravel(),
        start_ns=start.ravel(),
        end_ns=end.ravel(),
        **{name: np.tile(getattr(columns, name), steps) for name in names},
    )


def unit_durations(program: Program, forward: int = 1, backward: int = 2) -> Callable[[int, int], int]:
    """Durations in ns: forwards and backwards as given, everything else nothing."""
    length = {"forward": forward, "backward": backward}
    return lambda row, step: length.get(program.instruction(row).kind.name, 0)
