"""Parts of a rank with any edges between any streams, for laws of what follows what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from program.layouts import training_program

from weft.methods.sharding.kinds import GATHER, REDUCE
from weft.program.kinds import BACKWARD, FORWARD, RECEIVE_ACTIVATION, SEND_ACTIVATION, STEP
from weft.program.program import Columns, Edges
from weft.program.rank_program import RankProgram, part_of


@st.composite
def parts(draw: st.DrawFn) -> RankProgram:
    """A rank with any edges between any streams, of one or two steps per cycle."""
    rows, steps, first = draw(st.integers(1, 12)), draw(st.integers(1, 2)), draw(st.integers(0, 5))
    # Numbers of a generator: lists that hypothesis draws have few edges that others imply.
    chosen = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = [FORWARD, BACKWARD, STEP, GATHER, REDUCE, SEND_ACTIVATION, RECEIVE_ACTIVATION]
    columns = Columns.of(
        rows,
        kind=chosen.choice(kinds, rows),
        peer=chosen.integers(1, 3, rows),
        iteration=np.sort(chosen.integers(0, steps, rows)),
    )
    source, target, distance = chosen.integers(0, (rows, rows, 3), (int(chosen.integers(0, 30)), 3)).T
    possible = (source < target) | (distance > 0)
    source, target, distance = source[possible], target[possible], distance[possible]
    whole = part_of(training_program("gpipe", 1, 1, (1,), 1), 0)
    return replace(
        whole,
        steps_per_cycle=steps,
        first_row=first,
        columns=columns,
        edges=Edges(source=source + first, target=target + first, distance=distance),
    )
