"""`Program`: the instructions of all ranks as columns, with explicit dependency edges.

A Program is one cycle of `steps_per_cycle` optimizer steps. The cycle repeats after an optional prologue
(`iteration` = -1). Rows are sorted by rank and, within a rank, by the order in which the host issues them.
A queue (rank, stream, peer) is first in, first out. Verifier, simulator, executor and hang localisation use
the same edges. Everything here is immutable; `Instruction` is a view for printing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weft.describe.one_line import one_line
from weft.program.arrays import Ids, Ints
from weft.program.codes import GOLDEN, distinct_rows, mix
from weft.program.kinds import KINDS, Kind, is_collective, name_hash

# The ranks of each group.
Groups = tuple[tuple[int, ...], ...]

NONE = -1


@dataclass(frozen=True, slots=True)
class Instruction:
    """A row of a Program, for printing. `position` is its row; no pass changes `id`."""

    position: int
    id: int
    kind: Kind
    stage: int
    micro_batch: int
    iteration: int
    rank: int
    replica: int
    part: int
    peer: int
    group: int
    bytes: int
    most_bytes: int

    def __str__(self) -> str:
        text = f"{self.kind.symbol}{self.stage}"
        if self.micro_batch != NONE:
            text += f".{self.micro_batch}"
        return text


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The instruction table; all arrays have the same length.

    Attributes:
        kind: code in `KINDS`.
        stage, micro_batch, iteration, replica, part: the coordinates that make the id; -1 where one does not
            apply. `micro_batch` counts over the whole global batch; `iteration` is the step in the cycle, -1
            in the prologue; `part` numbers the pieces of one instruction, or is the other stage of a message.
        rank: the rank that runs the row. peer: the other rank of a message, or -1.
        group: index into `Program.groups` for collectives, or -1.
        bytes: payload of one message or collective per rank; the expected payload if it depends on data.
        most_bytes: the largest possible payload, which fits in the buffers.
    """

    kind: Ints
    stage: Ints
    micro_batch: Ints
    iteration: Ints
    rank: Ints
    replica: Ints
    part: Ints
    peer: Ints
    group: Ints
    bytes: Ints
    most_bytes: Ints

    def __repr__(self) -> str:
        return one_line(self, f"of {len(self)} instructions")

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: Ints) -> Columns:
        return Columns(**{name: getattr(self, name)[rows] for name in COLUMN_NAMES})

    @classmethod
    def join(cls, parts: list[Columns]) -> Columns:
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMN_NAMES})

    @classmethod
    def of(cls, length: int, **values: npt.ArrayLike) -> Columns:
        """Build columns of `length` rows; a scalar fills its column.

        Missing columns are -1, but `part`, `bytes` and `iteration` are 0 and `most_bytes` equals `bytes`.
        """
        default = {"part": 0, "bytes": 0, "iteration": 0, "most_bytes": values.get("bytes", 0)}
        return cls(
            **{
                name: np.full(length, values.get(name, default.get(name, NONE)), dtype=np.int64)
                for name in COLUMN_NAMES
            }
        )


COLUMN_NAMES = tuple(column.name for column in fields(Columns))


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Edges between positions: `target` may start after the end of `source`, `distance` cycles earlier."""

    source: Ints
    target: Ints
    distance: Ints

    def __repr__(self) -> str:
        return one_line(self, f"of {len(self)} dependencies")

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def join(cls, parts: list[Edges]) -> Edges:
        names = ("source", "target", "distance")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Edges:
        return Edges(source=self.source[rows], target=self.target[rows], distance=self.distance[rows])

    def at(self, position: Ints) -> Edges:
        """Return these edges after rows have moved; `position` has the new position of each row."""
        return Edges(source=position[self.source], target=position[self.target], distance=self.distance)

    @classmethod
    def of(cls, source: npt.ArrayLike, target: npt.ArrayLike, distance: npt.ArrayLike = 0) -> Edges:
        source = np.asarray(source, dtype=np.int64)
        target = np.asarray(target, dtype=np.int64)
        return cls(source=source, target=target, distance=np.full(len(source), distance, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Owed:
    """A program's obligations to one method; each method has its own subclass."""

    @property
    def facts(self) -> Mapping[str, str]:
        """The method's entries in the table of a program, by name."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Obligations:
    """The obligations of one cycle of a Program, independent of its order.

    Attributes:
        purpose: train, evaluate, generate or custom.
        stage_edges: (producer, consumer) pairs of stages.
        forward, backward: rows (stage, replica, micro_batch, iteration) that must run exactly once; a
            backward may run whole or as input part plus weight part.
        step: rows (stage, replica, iteration); the stage's optimizer must step exactly once on every rank of
            the replica.
        owners: the ranks that run each (stage, replica).
        methods: the obligations to each method, by its name.
        splits: by stage, the number of its own micro-batches per micro-batch of the batch; empty: 1 each.
        sources: the stages that read samples.
    """

    purpose: str
    stage_edges: tuple[tuple[int, int], ...]
    forward: Ints
    backward: Ints
    step: Ints
    owners: Mapping[tuple[int, int], tuple[int, ...]]
    methods: Mapping[str, Owed] = field(default_factory=dict)
    splits: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    def split(self, stage: int) -> int:
        """Return the number of a stage's own micro-batches per micro-batch of the batch."""
        return self.splits[stage] if self.splits else 1

    def __repr__(self) -> str:
        owed = f"{len(self.forward)} forwards, {len(self.backward)} backwards, {len(self.step)} steps"
        return one_line(self, f"to {self.purpose}: {owed}")


@dataclass(frozen=True)
class GroupKin:
    """Corresponding groups among a program's `count` groups, computed at first use.

    `by_replica` and `by_lane` are tables of group numbers, -1 for none. Their last axis is the replica or
    the lane.
    """

    count: int
    by_replica: tuple[Ints, ...]
    by_lane: tuple[Ints, ...]

    @cached_property
    def replicas(self) -> Ints:
        """A number per group, equal in corresponding groups of replicas or sharer groups; shape (groups,)."""
        return self._joined(self.by_replica)

    @cached_property
    def lanes(self) -> Ints:
        """A number per group, equal in corresponding groups of lanes, which run in step; shape (groups,)."""
        return self._joined(self.by_lane)

    def __repr__(self) -> str:
        return one_line(self, f"of {self.count} groups")

    def _joined(self, tables: tuple[Ints, ...]) -> Ints:
        number = np.arange(self.count, dtype=np.int64)
        for table in tables:
            there = table != NONE
            first = np.where(there, table, self.count).min(axis=-1, keepdims=True)
            np.minimum.at(number, table[there], np.broadcast_to(first, table.shape)[there])
        return number


@dataclass(frozen=True, kw_only=True)
class Program:
    """Instructions, edges and obligations of all ranks. Build it with a compiler, check it with `verify`.

    Attributes:
        kin: the corresponding groups; None without groups.
        schedule: name of the order of micro-batches, for printing.
        kept_replica, kept_lane: the replica or lane that stands for all others (see `weft.program.fold`).
    """

    ranks: int
    steps_per_cycle: int
    columns: Columns
    edges: Edges
    groups: Groups = ()
    obligations: Obligations
    kin: GroupKin | None = None
    schedule: str = ""
    kept_replica: int | None = None
    kept_lane: int | None = None

    def __repr__(self) -> str:
        size = f"{len(self)} instructions, {len(self.edges)} dependencies"
        return one_line(self, f"of {self.ranks} ranks: {size}, {self.steps_per_cycle} steps per cycle")

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def ids(self) -> Ids:
        """Stable 64-bit ids: a hash of (kind, stage, micro-batch, iteration, replica, rank lane, part)."""
        return instruction_ids(self.columns, self._lane)

    @cached_property
    def _lane(self) -> Ints:
        """Position of each row's rank among the ranks of its stage replica (tensor rank); mostly 0."""
        owners = self.obligations.owners
        stages = 1 + max((stage for stage, _ in owners), default=NONE)
        ranks = max([self.ranks, *(1 + max(ranks, default=NONE) for ranks in owners.values())])
        # No rank holds a stage twice. The last column is for rows of none of these stages.
        lanes = np.zeros((ranks, stages + 1), dtype=np.int64)
        for (stage, _), holders in owners.items():
            lanes[list(holders), stage] = np.arange(len(holders))
        return lanes[self.columns.rank, np.minimum(self.columns.stage, stages)]

    @cached_property
    def rank_starts(self) -> Ints:
        """First row of each rank, plus the length: rank r owns rows `rank_starts[r]:rank_starts[r+1]`."""
        return np.searchsorted(self.columns.rank, np.arange(self.ranks + 1)).astype(np.int64)

    @cached_property
    def stream(self) -> Ints:
        """Index of each row's stream name in `stream_names`."""
        position = {name: index for index, name in enumerate(self.stream_names)}
        table = np.array([position[kind.stream] for kind in KINDS], dtype=np.int64)
        return table[self.columns.kind]

    @cached_property
    def stream_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind.stream for kind in KINDS))

    @cached_property
    def queue(self) -> Ints:
        """Dense number of each row's queue: (rank, stream, peer), for collectives (rank, stream)."""
        columns = self.columns
        collective = is_collective(columns.kind)
        alone = collective | (columns.peer == NONE)
        # Peers are near each other: differences of ranks need fewer codes than ranks.
        away = columns.peer - columns.rank
        away = np.where(alone, away.min(initial=0) - 1, away)
        return distinct_rows(columns.rank, self.stream, away)[1]

    def instruction(self, position: int) -> Instruction:
        """Return the row at a position, for printing."""
        return instruction_of(self.columns, position, position=position, id=int(self.ids[position]))

    def of_rank(self, rank: int) -> Iterator[Instruction]:
        """Yield the rank's instructions in the order its host issues them."""
        for position in range(int(self.rank_starts[rank]), int(self.rank_starts[rank + 1])):
            yield self.instruction(position)


def instruction_of(columns: Columns, row: int, *, position: int, id: int) -> Instruction:
    """Return one row of columns as an `Instruction`; `position` is its row in the whole program."""
    values = {name: int(getattr(columns, name)[row]) for name in COLUMN_NAMES}
    return Instruction(position=position, id=id, kind=KINDS[values.pop("kind")], **values)


def instruction_ids(columns: Columns, lane: Ints) -> Ids:
    """Compute the id of every row, a hash of its coordinates; `lane` is by row, as in `Program.ids`.

    Rows of no replica have their rank in place of the lane. A value that a rank sends to several lanes of a
    stage is sent in rows next to each other. Those behind the first also have their distance from it in the
    hash.
    """
    lane = np.where(columns.replica == NONE, columns.rank, lane)
    kind_names = np.array([name_hash(kind.name) for kind in KINDS], dtype=np.uint64)
    coordinates = (
        columns.stage,
        columns.micro_batch,
        columns.iteration,
        columns.replica,
        lane,
        columns.part,
    )
    ids = mix_in(kind_names[columns.kind], *coordinates)
    again = 1 + np.flatnonzero((ids[1:] == ids[:-1]) & (columns.peer[1:] != columns.peer[:-1]))
    if len(again):
        # The last row that is not a repetition, for each of them.
        first = np.arange(len(ids), dtype=np.int64)
        first[again] = 0
        first = np.maximum.accumulate(first)
        ids[again] = mix_in(ids[again], again - first[again])
    return ids


def mix_in(value: Ids, *numbers: Ints | Ids) -> Ids:
    """Return a hash of each value with its numbers (`mix` over a running combination)."""
    for number in numbers:
        value = mix(value + number.astype(np.uint64) * GOLDEN)
    return value
