"""Stages whose passes consist of several segments, with collectives between them.

A forward pass runs its segments in order, a backward pass in the opposite one; segments are numbered (`part`)
as the forward pass runs them, and border b lies between segments b and b + 1. What runs last, segment n - 1
forward and segment 0 backward, is the `forward` or `backward` itself: it completes what others wait for.
Every segment before is a row of its own, and so is the collective of every border. A backward segment may be
split: its input part comes before the collective, its weight part runs beside it.

A method says where its stages are cut (`CutInSegments`), and registers the kinds of its collectives: one that
reads `segment_output` and writes `segment_input`, one that reads `segment_gradient` and writes
`border_gradient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.program import places
from weft.program.arrays import Ints
from weft.program.kinds import AddedUses, computation
from weft.program.places import Places
from weft.program.program import Owed, Program
from weft.program.values import PER_MICRO_BATCH, VALUES, Read, Use, ValueKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What ranks exchange between two segments of a pass.

    Attributes:
        kind: code of the collective.
        bytes: expected payload per rank, which is predicted. most_bytes: the most, for which there is room.
    """

    kind: int
    bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSegments:
    """The borders of a stage's forward and backward pass, and by backward segment whether it is split."""

    forward: tuple[Border, ...] = ()
    backward: tuple[Border, ...] = ()
    split: tuple[bool, ...] = (False,)


@dataclass(frozen=True, kw_only=True)
class CutInSegments(Owed):
    """Passes of stages consist of segments; by stage, whole ones have no borders."""

    segments: tuple[StageSegments, ...]

    @property
    def facts(self) -> Mapping[str, str]:
        most = max(len(one.forward) for one in self.segments)
        return {"segments of a forward pass": f"up to {most + 1}"}


def segments_of(methods: Mapping[str, Owed]) -> CutInSegments | None:
    """How the stages of a program that owes this are cut; None where all passes are whole."""
    return next((one for one in methods.values() if isinstance(one, CutInSegments)), None)


def segment_borders(program: Program) -> Ints:
    """Return the rows of collectives between segments."""
    owed = segments_of(program.obligations.methods)
    stages = () if owed is None else owed.segments
    kinds = sorted({border.kind for one in stages for border in (*one.forward, *one.backward)})
    rows: Ints = np.flatnonzero(np.isin(program.columns.kind, kinds))
    return rows


def _borders(program: Program, rows: Ints, *, backward: bool) -> Ints:
    """How many borders a pass of each row's stage has."""
    owed = segments_of(program.obligations.methods)
    # The last one is for stages that there are not.
    counts = [len(one.backward if backward else one.forward) for one in (owed.segments if owed else ())] + [0]
    stage = np.minimum(program.columns.stage[rows], len(counts) - 1)
    found: Ints = np.array(counts, dtype=np.int64)[stage]
    return found


def _at(rows: Ints, part: Ints, borders: Ints) -> Places:
    """At these borders, where there are such."""
    there = (part >= 0) & (part < borders)
    return Places(rows[there], {"part": part[there]})


def border_before(program: Program, rows: Ints) -> Places:
    """At the border before a forward segment; before the last one of its stage for a forward."""
    columns, borders = program.columns, _borders(program, rows, backward=False)
    segment = np.where(columns.kind[rows] == FORWARD_SEGMENT, columns.part[rows], borders)
    return _at(rows, segment - 1, borders)


def border_behind(program: Program, rows: Ints) -> Places:
    """At the border behind a segment, which its backward pass comes over; behind the first for a backward."""
    return _at(rows, program.columns.part[rows], _borders(program, rows, backward=True))


def border_ahead(program: Program, rows: Ints) -> Places:
    """At the border before a segment, to which its backward pass goes."""
    return _at(rows, program.columns.part[rows] - 1, _borders(program, rows, backward=True))


def _first(program: Program, rows: Ints) -> Ints:
    """Return the segments with which forward passes begin."""
    first: Ints = rows[program.columns.part[rows] == 0]
    return first


def _last(program: Program, rows: Ints) -> Ints:
    """Return the segments with which backward passes begin."""
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
# The weights were there for the first segment, and the others follow it.
_BACK = (
    Read("saved", waits="first"),
    Read(
        "output_gradient",
        at=lambda program, rows: places.from_next(program, _last(program, rows)),
        otherwise=Read(
            "input_gradient", at=lambda program, rows: places.of_next(program, _last(program, rows))
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

# What a method that cuts stages contributes: what completes a pass reads what crossed the last border.
USES = (
    AddedUses(kinds=("forward",), reads=(_CROSSED,)),
    AddedUses(kinds=("backward",), reads=(_CROSSED_BACK,)),
)

SEGMENTS = (FORWARD_SEGMENT, BACKWARD_SEGMENT, INPUT_SEGMENT, WEIGHT_SEGMENT)

# Segments that add to a stage's gradient before its backward completes it.
ADDS_GRADIENTS = (BACKWARD_SEGMENT, WEIGHT_SEGMENT)
