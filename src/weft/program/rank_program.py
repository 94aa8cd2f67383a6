"""`RankProgram`: one rank's part of a Program; its size depends on the rank's work only.

Its rows, ids, edges and groups keep their values and positions in the whole program. A part is built by
itself (`weft.program.assemble`) or taken out of a whole program (`part_of`). Both are equal; digests compare
parts that are never in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weft.describe.one_line import one_line
from weft.program.arrays import Ids, Ints
from weft.program.kinds import FORWARD
from weft.program.program import (
    NONE,
    Columns,
    Edges,
    Instruction,
    Obligations,
    Program,
    instruction_ids,
    instruction_of,
    mix_in,
)


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """One rank's part of a Program.

    Attributes:
        rank: the rank of the part. ranks: number of ranks in the whole program.
        micro_batches: number of micro-batches in the whole global batch.
        first_row: position of the rank's first row in the whole program.
        columns: the rank's rows.
        edges: all edges that touch one of them; they count rows of the whole program.
        groups: the ranks of each group of one of the rows, by the group's number in the whole program.
        obligations: the obligations of the stages and replicas that the rank runs.
    """

    rank: int
    ranks: int
    micro_batches: int
    steps_per_cycle: int
    first_row: int
    columns: Columns
    edges: Edges
    groups: Mapping[int, tuple[int, ...]]
    obligations: Obligations

    def __repr__(self) -> str:
        return one_line(self, f"of rank {self.rank} of {self.ranks}: {len(self)} instructions")

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def positions(self) -> range:
        """Positions of the rank's rows in the whole program."""
        return range(self.first_row, self.first_row + len(self))

    @cached_property
    def ids(self) -> Ids:
        """Ids of the rank's rows, as in the whole program."""
        owners = self.obligations.owners
        lanes = np.zeros(2 + max((stage for stage, _ in owners), default=NONE), dtype=np.int64)
        for (stage, _), ranks in owners.items():
            lanes[stage] = ranks.index(self.rank)
        # The last entry is for rows of none of these stages.
        return instruction_ids(self.columns, lanes[np.minimum(self.columns.stage, len(lanes) - 1)])

    def peers(self, *kinds: int) -> set[int]:
        """Return the ranks with which the rank exchanges messages of these kinds."""
        return set(self.columns.peer[np.isin(self.columns.kind, kinds)].tolist())

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages that the rank holds, ascending."""
        return tuple(sorted({stage for stage, _ in self.obligations.owners}))

    def micro_batches_of(self, stage: int) -> list[int]:
        """Return the micro-batches that the rank runs through a stage, rising."""
        own = (self.columns.kind == FORWARD) & (self.columns.stage == stage)
        numbers: list[int] = np.unique(self.columns.micro_batch[own]).tolist()
        return numbers

    @property
    def digest(self) -> int:
        """A hash that distinguishes this part from others: of rows, ids, peers, groups and edges."""
        positions = np.arange(self.first_row, self.first_row + len(self), dtype=np.int64)
        rows = _row_marks(positions, self.ids, self.columns, self.groups)
        return int(np.concatenate([rows, _edge_marks(self.edges)]).sum(dtype=np.uint64))

    def instructions(self) -> Iterator[Instruction]:
        """Yield the rank's instructions in the order its host issues them."""
        for row, position in enumerate(self.positions):
            yield instruction_of(self.columns, row, position=position, id=int(self.ids[row]))


def part_of(program: Program, rank: int) -> RankProgram:
    """Return one rank's part of a whole program."""
    first, end = (int(row) for row in program.rank_starts[rank : rank + 2])
    columns, edges, owed = program.columns.take(np.arange(first, end)), program.edges, program.obligations
    touching = np.zeros(len(edges), dtype=np.bool_)
    for rows in (edges.source, edges.target):
        touching |= (rows >= first) & (rows < end)
    owners = {place: ranks for place, ranks in owed.owners.items() if rank in ranks}
    met = np.unique(columns.group)
    return RankProgram(
        rank=rank,
        ranks=program.ranks,
        micro_batches=_micro_batches(owed),
        steps_per_cycle=program.steps_per_cycle,
        first_row=first,
        columns=columns,
        edges=edges.take(touching),
        groups={group: program.groups[group] for group in met.tolist() if group != NONE},
        obligations=replace(
            owed,
            forward=_of_places(owed.forward, owners),
            backward=_of_places(owed.backward, owners),
            step=_of_places(owed.step, owners),
            owners=owners,
        ),
    )


def digests(program: Program) -> Ids:
    """Return the digest of every rank's part, shape (ranks,)."""
    columns, edges = program.columns, program.edges
    found = np.zeros(program.ranks, dtype=np.uint64)
    positions = np.arange(len(columns), dtype=np.int64)
    rows = _row_marks(positions, program.ids, columns, dict(enumerate(program.groups)))
    np.add.at(found, columns.rank, rows)
    marks = _edge_marks(edges)
    source, target = columns.rank[edges.source], columns.rank[edges.target]
    np.add.at(found, source, marks)
    np.add.at(found, target[source != target], marks[source != target])
    return found


def _micro_batches(owed: Obligations) -> int:
    """Return the number of micro-batches in the whole global batch."""
    stage = int(owed.forward[0, 0])
    own = len(np.unique(owed.forward[owed.forward[:, 0] == stage, 2]))
    return own // owed.split(stage)


def _of_places(rows: Ints, places: Mapping[tuple[int, int], object]) -> Ints:
    """Return the rows with one of these places (stage, replica) in their first two columns."""
    kept = [place in places for place in map(tuple, rows[:, :2].tolist())]
    return rows[np.array(kept, dtype=np.bool_)]


def _row_marks(positions: Ints, ids: Ids, columns: Columns, groups: Mapping[int, tuple[int, ...]]) -> Ids:
    """Return a hash of each row: its position, coordinates and partners."""
    members = np.zeros(1 + max(groups, default=NONE) + 1, dtype=np.uint64)
    for group, ranks in groups.items():
        # A hash of the group's members in their order.
        places = np.arange(len(ranks), dtype=np.uint64)
        members[group] = int(mix_in(places, np.array(ranks, dtype=np.int64)).sum(dtype=np.uint64))
    # The last entry is for rows without a group.
    sizes = columns.bytes, columns.most_bytes
    return mix_in(ids, positions, columns.rank, columns.peer, columns.group, *sizes, members[columns.group])


def _edge_marks(edges: Edges) -> Ids:
    return mix_in(edges.source.astype(np.uint64), edges.target, edges.distance)
