"""Communication without overlap with computation, as other frameworks ship it.

`messages`: a device computes, then exchanges messages, then computes again, as Megatron-LM does without its
overlap options. All sends and receives of an exchange are one call. It begins when both ends of each message
have reached it, and a device computes again when it is over. A device with one stage exchanges after every
computation. A device with several stages that alternates also runs the backward after a forward, and
exchanges for both.

`reductions`: gradients are reduced after the device's last backward, not after the last backward of each
stage. Plain data parallelism without hooks does so. Replicas that shard gradients have no room for all of
them. They reduce in turn with computations, as DeepSpeed does without `overlap_comm`.

`gathers`: weights are gathered in turn with computations. Weights that stay are gathered before the first
computation of a step. DeepSpeed's stages 1 and 2 do so, and Megatron-LM without `--overlap-param-gather`.

A comparison with and without them splits a gain between the order and its implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Blocking, Plan
from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, COMPUTATIONS, FORWARD, MESSAGES, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, renumber
from weft.program.passes import Pass
from weft.program.program import NONE, Edges

NAME = "blocking"


_REDUCTIONS = (REDUCE, REDUCE_ACROSS)


@dataclass(frozen=True, slots=True)
class Blocked:
    """The communication that devices wait for.

    `keeps_gradients`: a device has room for every gradient until its last backward.
    """

    words: tuple[Blocking, ...]
    keeps_gradients: bool = True


def options(plan: Plan, graph: LayerGraph) -> Blocked | None:
    keeps_gradients = plan.sharding not in ("zero-2", "zero-3")
    return Blocked(plan.blocking, keeps_gradients) if plan.blocking else None


def block(pipeline: LoweredPipeline, layout: PipelineLayout, blocked: Blocked) -> LoweredPipeline:
    """Return the pipeline without overlap of the named communication with computations."""
    if "gathers" in blocked.words:
        pipeline = _in_turn(pipeline, (GATHER,))
    if "reductions" in blocked.words:
        pipeline = _reduce_at_end(pipeline) if blocked.keeps_gradients else _in_turn(pipeline, _REDUCTIONS)
    if "messages" in blocked.words:
        pipeline = _exchange_in_turn(pipeline)
    return pipeline


def _in_turn(pipeline: LoweredPipeline, kinds: tuple[int, ...]) -> LoweredPipeline:
    """Let the computation after each collective wait for it; it follows the computation before it anyway."""
    rank, rows = pipeline.columns.rank, np.flatnonzero(is_any_of(pipeline.columns.kind, kinds))
    computations = _computations(pipeline)
    after = np.append(computations, NONE)[np.searchsorted(computations, rows)]
    holds_up = (after != NONE) & (rank[after] == rank[rows])
    waits = Edges.of(rows[holds_up], after[holds_up])
    return LoweredPipeline(pipeline.columns, Edges.join([pipeline.edges, waits]))


def _reduce_at_end(pipeline: LoweredPipeline) -> LoweredPipeline:
    columns = pipeline.columns
    reduces = np.flatnonzero(is_any_of(columns.kind, _REDUCTIONS))
    computations = _computations(pipeline)
    last = np.full(int(columns.rank.max(initial=0)) + 1, NONE, dtype=np.int64)
    last[columns.rank[computations]] = computations
    place = 2 * np.arange(len(columns), dtype=np.int64)
    place[reduces] = 2 * last[columns.rank[reduces]] + 1
    waits = Edges.of(last[columns.rank[reduces]], reduces)
    return _reordered(pipeline, place, waits)


class _Turns(NamedTuple):
    """The turns of computations between exchanges: device, first and last row of each turn, in order."""

    device: Ints
    first: Ints
    last: Ints

    def next_to(self, turn: Ints, step: int) -> Ints:
        """Return the turn `step` turns later on the same device, or -1."""
        other = np.clip(turn + step, 0, len(self.device) - 1)
        same = (self.device[other] == self.device[turn]) & (other == turn + step)
        return np.where(same, other, NONE)


def _exchange_in_turn(pipeline: LoweredPipeline) -> LoweredPipeline:
    """Put messages between turns of computations: turns wait for their exchange, exchanges for both ends."""
    columns, edges = pipeline.columns, pipeline.edges
    turns, turn_of = _turns(pipeline)
    sends, receives = (is_any_of(columns.kind, kinds) for kinds in zip(*MESSAGES, strict=True))
    now = edges.distance == 0
    made = now & sends[edges.target]
    used = now & receives[edges.source]
    flown = now & sends[edges.source] & receives[edges.target]
    partner = np.full(len(columns), NONE, dtype=np.int64)
    partner[edges.target[made]] = edges.source[made]
    partner[edges.source[used]] = edges.target[used]
    send, receive = edges.source[flown], edges.target[flown]
    sending, receiving = turn_of[partner[send]], turn_of[partner[receive]]
    after, before = turns.next_to(sending, 1), turns.next_to(receiving, -1)
    goes_on, came = after != NONE, before != NONE
    waits = Edges.join(
        [
            Edges.of(turns.last[sending], send),
            Edges.of(send[goes_on], turns.first[after[goes_on]]),
            Edges.of(receive, turns.first[receiving]),
            Edges.of(turns.last[before[came]], send[came]),
        ]
    )
    # Sends follow the last computation of their turn, receives precede the first computation of their turn.
    place = 4 * np.arange(len(columns), dtype=np.int64)
    place[send] = 4 * turns.last[sending] + 1
    place[receive] = 4 * turns.first[receiving] - 1
    return _reordered(pipeline, place, waits)


def _turns(pipeline: LoweredPipeline) -> tuple[_Turns, Ints]:
    """Return the turns, and the turn of each row that computes."""
    columns = pipeline.columns
    rows = _computations(pipeline)
    device, kind = columns.rank[rows], columns.kind[rows]
    stages = np.unique(np.stack([device, columns.stage[rows]]), axis=1)[0]
    forwards = kind == FORWARD
    again = np.zeros(len(np.bincount(device)), dtype=np.bool_)
    again[device[1:][forwards[1:] & ~forwards[:-1] & (device[1:] == device[:-1])]] = True
    alternates = (np.bincount(stages) > 1)[device] & again[device]
    goes_on = alternates[1:] & forwards[:-1] & is_any_of(kind[1:], (BACKWARD, BACKWARD_INPUT))
    goes_on &= device[1:] == device[:-1]
    starts = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    ends = np.append(starts[1:], len(rows)) - 1
    turn_of = np.full(len(columns), NONE, dtype=np.int64)
    turn_of[rows] = np.cumsum(np.concatenate([[True], ~goes_on])) - 1
    return _Turns(device[starts], rows[starts], rows[ends]), turn_of


def _computations(pipeline: LoweredPipeline) -> Ints:
    """Return the rows that compute micro-batches, in order."""
    found: Ints = np.flatnonzero(is_any_of(pipeline.columns.kind, COMPUTATIONS))
    return found


def _reordered(pipeline: LoweredPipeline, place: Ints, waits: Edges) -> LoweredPipeline:
    """Return the pipeline with its rows in the order of `place` within their devices, and with more edges."""
    order = np.lexsort((place, pipeline.columns.rank))
    return LoweredPipeline(pipeline.columns.take(order), renumber(Edges.join([pipeline.edges, waits]), order))


PASS = Pass(name=NAME, options=options, apply=block, after=("sharding", "tying"))
