"""The order of stages in which a rank meets the ranks of several of them."""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np

from weft.program.program import Columns


def stages_in_turn(columns: Columns, kind: int) -> list[int]:
    """Return the stages with rows of a kind, in an order that all devices' rows have.

    Among several orders, later stages come first: their gradients are complete first.
    """
    rows = np.flatnonzero(columns.kind == kind)
    before: TopologicalSorter[int] = TopologicalSorter()
    for device in np.unique(columns.rank[rows]).tolist():
        stages = list(dict.fromkeys(columns.stage[rows[columns.rank[rows] == device]].tolist()))
        before.add(stages[0])
        for former, later in pairwise(stages):
            before.add(later, former)
    before.prepare()
    ready: list[int] = []
    found: list[int] = []
    while before.is_active():
        ready += before.get_ready()
        ready.sort()
        found.append(ready.pop())
        before.done(found[-1])
    return found
