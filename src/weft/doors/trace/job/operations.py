"""Operations of a job's steps as columns, in the words of public traces of pipelines.

Names of operations and columns are those of ByteDance-Seed/StragglerAnalysis (What-if Analysis of stragglers,
2025) and of MegaScale's timer (Jiang et al., arXiv 2402.15627, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Floats, Ints, Mask
from weft.program.codes import codes
from weft.program.program import NONE


class PlaceInStep(Enum):
    """The place of an operation in a step."""

    PASS = "pass"
    MESSAGE = "message"
    BEFORE = "before the passes"
    AFTER = "after the passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationType:
    """A type of operation.

    Attributes:
        name: its name in traces. `kind`: the kind of instruction of a Program that does it.
        meets: its members: no other rank, its `replicas`, the `ends` of each pipeline, or `all` ranks.
    """

    name: str
    kind: str
    place: PlaceInStep
    meets: str = ""


OPERATIONS: tuple[OperationType, ...] = (
    OperationType(name="params-all-gather", kind="gather", place=PlaceInStep.BEFORE, meets="replicas"),
    OperationType(name="forward-compute", kind="forward", place=PlaceInStep.PASS),
    OperationType(name="backward-compute", kind="backward", place=PlaceInStep.PASS),
    OperationType(name="forward-send", kind="send_activation", place=PlaceInStep.MESSAGE),
    OperationType(name="forward-recv", kind="receive_activation", place=PlaceInStep.MESSAGE),
    OperationType(name="backward-send", kind="send_gradient", place=PlaceInStep.MESSAGE),
    OperationType(name="backward-recv", kind="receive_gradient", place=PlaceInStep.MESSAGE),
    OperationType(name="gc", kind="free", place=PlaceInStep.AFTER),
    OperationType(name="layernorm-grads-all-reduce", kind="take_gradient", place=PlaceInStep.AFTER),
    OperationType(
        name="embedding-grads-all-reduce", kind="reduce_tied", place=PlaceInStep.AFTER, meets="ends"
    ),
    OperationType(name="grads-reduce-scatter", kind="reduce", place=PlaceInStep.AFTER, meets="replicas"),
    OperationType(
        name="separate-grads-all-reduce", kind="reduce_across", place=PlaceInStep.AFTER, meets="replicas"
    ),
    OperationType(name="optimizer-clip-main-grad", kind="norm", place=PlaceInStep.AFTER, meets="all"),
    OperationType(name="optimizer", kind="step", place=PlaceInStep.AFTER),
)
TYPES: Mapping[str, int] = {one.name: index for index, one in enumerate(OPERATIONS)}
FORWARD, BACKWARD = TYPES["forward-compute"], TYPES["backward-compute"]
FORWARD_SEND, FORWARD_RECEIVE = TYPES["forward-send"], TYPES["forward-recv"]
BACKWARD_SEND, BACKWARD_RECEIVE = TYPES["backward-send"], TYPES["backward-recv"]
PASSES = (FORWARD, BACKWARD)
MESSAGES = (FORWARD_SEND, FORWARD_RECEIVE, BACKWARD_SEND, BACKWARD_RECEIVE)
GATHER, REDUCE = TYPES["params-all-gather"], TYPES["grads-reduce-scatter"]
SEPARATE = TYPES["separate-grads-all-reduce"]


def is_meeting(types: Ints) -> Mask:
    """Return True for each type of a message or a collective; shape as `types`."""
    return np.array([bool(one.meets) or one.place is PlaceInStep.MESSAGE for one in OPERATIONS])[types]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Operations of recorded steps, sorted by step, rank, type and sequence; arrays of shape (operations,).

    Attributes:
        name: of the trace. `steps`: the numbers of its steps.
        replicas, stages, chunks: counts of the job; a rank holds `chunks` parts of the model.
        left_out: steps without the operations of most others, and types that no rule covers; in words.
        type: index in `OPERATIONS`. `step`: index in `steps`.
        rank: counted from 0 without gaps, by replica within each stage.
        sequence: place among the operations of its type, rank and step.
        chunk, micro_batch: -1 where the trace has none.
        start_s, end_s: seconds since the first start of the step.
    """

    name: str
    steps: tuple[int, ...]
    replicas: int
    stages: int
    chunks: int
    left_out: tuple[str, ...]
    type: Ints
    step: Ints
    rank: Ints
    replica: Ints
    stage: Ints
    sequence: Ints
    chunk: Ints
    micro_batch: Ints
    start_s: Floats
    end_s: Floats

    def __len__(self) -> int:
        return len(self.type)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.rank.max()) + 1

    @property
    def per_step(self) -> int:
        """The number of operations of a step; all steps have the same ones."""
        return len(self) // len(self.steps)

    def take(self, rows: Ints) -> Operations:
        """Return the operations at `rows`, with the same counts of the job."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    @property
    def model_stage(self) -> Ints:
        """The stage of the whole model that each operation belongs to; chunks of ranks alternate."""
        return np.maximum(self.chunk, 0) * self.stages + self.stage

    @property
    def step_s(self) -> Floats:
        """Seconds of each step, from its first start to its last end; shape (steps,)."""
        return np.asarray(self.end_s.reshape(len(self.steps), -1).max(axis=1))


_COLUMNS = (
    "type",
    "step",
    "rank",
    "replica",
    "stage",
    "sequence",
    "chunk",
    "micro_batch",
    "start_s",
    "end_s",
)

LONGEST_STEP_S = 86_400.0

# The columns that every trace has; those that it may leave out follow from the order of operations.
NEEDED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
INTEGERS = ("dp_rank", "stage", "step", "rank", "seq_id", "mc", "mb_id")


def operations_of(columns: Mapping[str, Sequence[Any]], name: str) -> Operations:
    """Return the operations of a table with the columns of a public trace; times are in seconds.

    Raises:
        InputError: when columns are missing, values are none, or no step has a forward and a backward pass.
    """
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        problem = f"no trace of a job: {', '.join(missing)} missing"
        raise InputError(Violation(name, problem, f"the columns {', '.join(NEEDED)}"))
    words = [str(one) for one in columns["optype"]]
    unknown = sorted(set(words) - TYPES.keys())
    kept = np.flatnonzero([one in TYPES for one in words])
    types = np.array([TYPES[words[row]] for row in kept.tolist()], dtype=np.int64)
    if not {FORWARD, BACKWARD} <= set(types.tolist()):
        raise InputError(Violation(name, "no trace of a job: it has no forward-compute and backward-compute"))
    known = {one: _integers(columns[one], name, one)[kept] for one in INTEGERS if one in columns}
    start, length = (_seconds(columns[one], name, one)[kept] for one in ("start_ts", "duration"))
    for one in ("dp_rank", "stage"):
        values = np.unique(known[one])
        if not np.array_equal(values, np.arange(len(values))):
            raise InputError(Violation(f"{name}, {one}", "does not count from 0 without gaps"))
    if any((known[one] > len(types)).any() for one in known.keys() & {"mc", "mb_id", "seq_id"}):
        raise InputError(
            Violation(name, "chunks, micro-batches or sequences beyond the number of operations")
        )
    stage, replica = known["stage"], known["dp_rank"]
    place = codes(stage, replica, known.get("rank", np.zeros_like(stage)))
    rank = np.unique(place, return_inverse=True)[1]
    passes = np.isin(types, PASSES)
    if len(np.unique(np.stack([known["step"], rank, start])[:, passes], axis=1).T) < passes.sum():
        raise InputError(Violation(name, "two passes of a rank begin at the same time; rows may stand twice"))
    sequence = known.get("seq_id")
    if sequence is None:
        sequence = _sequence(types, rank, known["step"], start)
    found = Operations(
        name=name,
        steps=tuple(np.unique(known["step"]).tolist()),
        replicas=int(replica.max()) + 1,
        stages=int(stage.max()) + 1,
        chunks=max(0, int(known["mc"].max(initial=NONE)) if "mc" in known else 0) + 1,
        left_out=(f"operations of unknown types: {', '.join(unknown)}",) if unknown else (),
        type=types,
        step=np.unique(known["step"], return_inverse=True)[1],
        rank=rank,
        replica=replica,
        stage=stage,
        sequence=sequence,
        chunk=known.get("mc", np.where(np.isin(types, (FORWARD, BACKWARD, GATHER, REDUCE)), 0, NONE)),
        micro_batch=known.get("mb_id", np.full(len(types), NONE)),
        start_s=start,
        end_s=start + length,
    )
    alike = _of_alike_steps(found)
    if len(np.unique(alike.rank[np.isin(alike.type, PASSES)])) < found.ranks:
        raise InputError(Violation(name, "a rank has neither forward nor backward passes"))
    if float(alike.end_s.max()) > LONGEST_STEP_S:
        raise InputError(Violation(name, "operations of one step lie more than a day apart"))
    return alike


def _integers(values: Sequence[Any], name: str, column: str) -> Ints:
    try:
        return np.array([NONE if one is None else int(one) for one in values], dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(Violation(f"{name}, {column}", "not whole numbers")) from None


def _seconds(values: Sequence[Any], name: str, column: str) -> Floats:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(Violation(f"{name}, {column}", "not numbers of seconds")) from None
    if not np.isfinite(found).all() or (column == "duration" and (found < 0.0).any()):
        raise InputError(Violation(f"{name}, {column}", "not finite seconds, or less than 0"))
    return found


def _sequence(types: Ints, rank: Ints, step: Ints, start: Floats) -> Ints:
    """Return the place of each operation among those of its type, rank and step, by start."""
    key = codes(step, rank, types)
    order = np.lexsort((start, key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    place = np.arange(len(key)) - np.repeat(first, np.diff(np.append(first, len(key))))
    sequence = np.empty(len(key), dtype=np.int64)
    sequence[order] = place
    return sequence


def _of_alike_steps(found: Operations) -> Operations:
    """Return the steps with the most frequent set of operations, each sorted alike and from time 0."""
    order = np.lexsort((found.sequence, found.type, found.rank, found.step))
    what = np.stack([found.rank, found.type, found.sequence], axis=1)[order]
    ends = np.searchsorted(found.step[order], np.arange(len(found.steps) + 1))
    shapes = [what[first:end].tobytes() for first, end in pairwise(ends.tolist())]
    usual = max(shapes, key=lambda shape: (shapes.count(shape), len(shape)))
    alike = [index for index, shape in enumerate(shapes) if shape == usual]
    rows = np.concatenate([order[ends[index] : ends[index + 1]] for index in alike])
    per_step, begin = len(rows) // len(alike), found.start_s[rows].reshape(len(alike), -1).min(axis=1)
    begin = np.repeat(begin, per_step)
    other = [str(found.steps[index]) for index in range(len(shapes)) if index not in alike]
    left_out = (f"steps with other operations than most: {', '.join(other)}",) if other else ()
    return replace(
        found.take(rows),
        steps=tuple(found.steps[index] for index in alike),
        left_out=(*found.left_out, *left_out),
        step=np.repeat(np.arange(len(alike)), per_step),
        start_s=found.start_s[rows] - begin,
        end_s=found.end_s[rows] - begin,
    )
