"""Stages with passes of several segments, and collectives between the segments.

A forward pass runs its segments in order, a backward pass in reverse. Segments are numbered (`part`) in
forward order; border b lies between segments b and b + 1. The last segment of a pass is the `forward`
(segment n - 1) or `backward` (segment 0) itself. It completes the values that others wait for. Every
segment before it is a row of its own, and so is the collective of every border. A backward segment may be
split: its input part comes before the collective, its weight part overlaps with it. Where an order splits
backward passes, the last segment is `backward_input`, and `backward_weight` has the weight parts of all.

A method declares the cuts of its stages (`CutInSegments`) and registers the kinds of its collectives
(`border_kind`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.describe.replica_grid import Groups, ReplicaGrid
from weft.program import places
from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind, computation, is_any_of
from weft.program.places import Places
from weft.program.program import Owed, Program
from weft.program.values import PER_MICRO_BATCH, VALUES, Read, Use, ValueKind

Axis = Literal["tensor", "context", "expert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """The collective between two segments of a pass.

    Attributes:
        kind: code of the collective.
        bytes: expected payload per rank, for predictions. most_bytes: largest payload, for buffers.
    """

    kind: int
    bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSegments:
    """Borders of a stage's forward and backward pass; `split` is True for each split backward segment."""

    forward: tuple[Border, ...] = ()
    backward: tuple[Border, ...] = ()
    split: tuple[bool, ...] = (False,)


@dataclass(frozen=True, kw_only=True)
class CutInSegments(Owed):
    """The obligation of ranks along one axis of each replica to exchange between segments.

    Attributes:
        segments: of each stage's passes; a stage with whole passes has no borders.
        grids: of each stage's replicas.
        axis: of these grids.
    """

    segments: tuple[StageSegments, ...]
    grids: tuple[ReplicaGrid, ...]
    axis: Axis

    @property
    def facts(self) -> Mapping[str, str]:
        most = max(len(one.forward) for one in self.segments)
        return {
            "segments of a forward pass": f"up to {most + 1}",
            f"exchanges of {self.axis} ranks": "instructions",
        }

    @property
    def kinds(self) -> tuple[int, ...]:
        """The codes of the collectives, ascending."""
        return tuple(sorted({one.kind for each in self.segments for one in (*each.forward, *each.backward)}))

    def groups(self, stage: int, ranks: Sequence[int]) -> Groups:
        """Return the groups of a replica's ranks that exchange, each in the order of its shares."""
        return self.grids[stage].groups(ranks)[ReplicaGrid._fields.index(self.axis)]


def segments_of(methods: Mapping[str, Owed]) -> CutInSegments | None:
    """Return the cuts of a program with these obligations; None if all passes are whole."""
    return next((one for one in methods.values() if isinstance(one, CutInSegments)), None)


def cutter_of(methods: Mapping[str, Owed]) -> str | None:
    """Return the name of the method that cuts a program; None if all passes are whole."""
    return next((name for name, one in methods.items() if isinstance(one, CutInSegments)), None)


def segment_borders(program: Program) -> Ints:
    """Return the rows of collectives between segments."""
    owed = segments_of(program.obligations.methods)
    return np.flatnonzero(is_any_of(program.columns.kind, () if owed is None else owed.kinds))


def _borders(program: Program, rows: Ints, *, backward: bool) -> Ints:
    """Return the number of borders in a pass of each row's stage, shape (rows,)."""
    owed = segments_of(program.obligations.methods)
    # The last entry is for stages outside the list.
    counts = [len(one.backward if backward else one.forward) for one in (owed.segments if owed else ())] + [0]
    stage = np.minimum(program.columns.stage[rows], len(counts) - 1)
    return np.array(counts, dtype=np.int64)[stage]


def _at(rows: Ints, part: Ints, borders: Ints) -> Places:
    """Return the rows at these borders, without borders that do not exist."""
    there = (part >= 0) & (part < borders)
    return Places(rows[there], {"part": part[there]})


def border_before(program: Program, rows: Ints) -> Places:
    """Return the border before a forward segment; for a forward, the last border of its stage."""
    columns, borders = program.columns, _borders(program, rows, backward=False)
    segment = np.where(columns.kind[rows] == FORWARD_SEGMENT, columns.part[rows], borders)
    return _at(rows, segment - 1, borders)


def border_behind(program: Program, rows: Ints) -> Places:
    """Return the border behind a segment, the source of its output gradient; for a backward, the first."""
    return _at(rows, program.columns.part[rows], _borders(program, rows, backward=True))


def border_ahead(program: Program, rows: Ints) -> Places:
    """Return the border before a segment, the target of its input gradient."""
    return _at(rows, program.columns.part[rows] - 1, _borders(program, rows, backward=True))


def behind_first(program: Program, rows: Ints) -> Places:
    """Return all segments of each row's pass but the first, whose weights the row's pass has left."""
    borders = _borders(program, rows, backward=True)
    part = np.arange(borders.sum()) - np.repeat(borders.cumsum() - borders, borders)
    return Places(np.repeat(rows, borders), {"part": part + 1})


def _first(program: Program, rows: Ints) -> Ints:
    """Return the rows of first segments, with which forward passes begin."""
    first: Ints = rows[program.columns.part[rows] == 0]
    return first


def last_segments(program: Program, rows: Ints) -> Ints:
    """Return the rows of last segments, with which backward passes begin."""
    last: Ints = rows[program.columns.part[rows] == _borders(program, rows, backward=True)]
    return last


_PER_BORDER = (*PER_MICRO_BATCH, "part")
VALUES.register(ValueKind(name="segment_output", scope=_PER_BORDER, until="freed"))
VALUES.register(ValueKind(name="segment_input", scope=_PER_BORDER, until="freed"))
VALUES.register(ValueKind(name="segment_gradient", scope=_PER_BORDER, until="freed"))
VALUES.register(ValueKind(name="border_gradient", scope=_PER_BORDER, until="freed"))
VALUES.register(ValueKind(name="segment_for_weight", scope=_PER_BORDER, until="freed"))

_CROSSED = Read("segment_input", at=border_before, consumes=True)
_CROSSED_BACK = Read("border_gradient", at=border_behind, consumes=True)
# The first segment to run waits for the saved tensors and the weights; the others follow it.
_BACK = (
    Read("saved", waits="first"),
    Read(
        "output_gradient",
        at=lambda program, rows: places.from_next(program, last_segments(program, rows)),
        otherwise=Read(
            "input_gradient", at=lambda program, rows: places.of_next(program, last_segments(program, rows))
        ),
    ),
    "weights",
    _CROSSED_BACK,
)

_BEFORE = Read(
    "activation",
    at=lambda program, rows: places.from_previous(program, _first(program, rows)),
    otherwise=Read("output", at=lambda program, rows: places.of_previous(program, _first(program, rows))),
)
_AHEAD = Use("segment_gradient", at=border_ahead)
_FOR_WEIGHT = Read("segment_for_weight", consumes=True)
FORWARD_SEGMENT = computation("forward_segment", "Fs", (_BEFORE, "weights", _CROSSED), ("segment_output",))
BACKWARD_SEGMENT = computation("backward_segment", "Bs", _BACK, (_AHEAD, "weight_gradient"))
INPUT_SEGMENT = computation("input_segment", "Is", _BACK, (_AHEAD, "segment_for_weight"))
WEIGHT_SEGMENT = computation("weight_segment", "Ws", (_FOR_WEIGHT,), ("weight_gradient",))

# A method that cuts stages contributes these: the row that completes a pass reads from the last border.
USES = (
    AddedUses(kinds=("forward",), reads=(_CROSSED,)),
    AddedUses(kinds=("backward", "backward_input"), reads=(_CROSSED_BACK,)),
    AddedUses(
        kinds=("backward_weight",), reads=(Read("segment_for_weight", at=behind_first, consumes=True),)
    ),
)


def border_kind(name: str, symbol: str, stream: str, *, backward: bool) -> int:
    """Register a collective between two segments of a forward or a backward pass, and return its code."""
    read, written = (
        ("segment_gradient", "border_gradient") if backward else ("segment_output", "segment_input")
    )
    return KINDS.register(
        Kind(
            name=name,
            symbol=symbol,
            stream=stream,
            reads=(Read(read, consumes=True),),
            writes=(written,),
            collective=True,
        )
    )


BACKWARD_SEGMENTS = (BACKWARD_SEGMENT, INPUT_SEGMENT, WEIGHT_SEGMENT)
SEGMENTS = (FORWARD_SEGMENT, *BACKWARD_SEGMENTS)

# Segments that add to a stage's gradient before its backward completes it.
ADDS_GRADIENTS = (BACKWARD_SEGMENT, WEIGHT_SEGMENT)
