"""Rows whose replicas add up gradients inside nodes first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from equality_table import Row
from one_process import Method
from small_plans import tiny

from weft.describe.plan import Choice


@dataclass(frozen=True)
class ByNode(Method):
    """Of so many replicas on a node."""

    replicas: int

    @property
    def sync(self) -> Choice:
        return Choice(name="hierarchical", options={"replicas_per_node": self.replicas})


NODES = partial(Row, tiny(layers=2, tied=True), micro_batches=2, dp=4, methods=(ByNode(2),))
ROWS = (
    NODES(shares=(3, 1, 2, 2)),
    NODES(sharding="zero-1", optimizer="adamw", steps=3),
    NODES(schedule="breadth-first", loops=2, sharding="zero-3"),
    NODES(dp=2, schedule="chimera", pp=2),
)
