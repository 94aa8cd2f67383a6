"""Figures of a timeline: busy time of ranks, by kind, and errors of predictions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeVar

import numpy as np

from weft.program.arrays import Floats, Ints
from weft.program.kinds import BACKWARD, BACKWARD_WEIGHT, CODEC, FORWARD, KINDS, is_collective, is_compute
from weft.program.program import NONE, Program
from weft.timeline.timeline import Timeline


def makespan_s(timeline: Timeline) -> float:
    """Return seconds from the first start to the last end."""
    if not len(timeline):
        return 0.0
    return float(timeline.end_ns.max() - timeline.start_ns.min()) / 1e9


def busy_s(timeline: Timeline) -> Floats:
    """Return the seconds of computation on each rank, one value per existing rank, ascending."""
    compute = is_compute(timeline.kind)
    ranks, rank = np.unique(timeline.rank, return_inverse=True)
    duration = (timeline.end_ns - timeline.start_ns)[compute]
    return np.bincount(rank[compute], weights=duration, minlength=len(ranks)) / 1e9


def busy_fraction(timeline: Timeline) -> Floats:
    """Return each rank's computation as a share of the makespan, one value per existing rank, ascending."""
    makespan = makespan_s(timeline)
    return busy_s(timeline) / makespan if makespan else np.zeros_like(busy_s(timeline))


def bubble_fraction(timeline: Timeline) -> float:
    """Return 1 - busy / (ranks * makespan)."""
    fraction = busy_fraction(timeline)
    return 1.0 - float(fraction.mean()) if len(fraction) else 0.0


def busy_by_kind(timeline: Timeline) -> dict[str, float]:
    """Return seconds by kind of instruction, all ranks together, in order of registration."""
    duration = np.bincount(timeline.kind, weights=timeline.end_ns - timeline.start_ns, minlength=len(KINDS))
    occurs = np.bincount(timeline.kind, minlength=len(KINDS)) > 0
    return {kind.name: float(duration[code]) / 1e9 for code, kind in enumerate(KINDS) if occurs[code]}


def peak_in_flight(program: Program) -> list[int]:
    """Return the most stage-micro-batches each rank holds at once, from the order of its program alone.

    A rank holds one from its forward to its backward, or to the weight part of a split backward. A stage
    without training holds none. A program without backwards counts as if it kept everything.
    """
    change = np.zeros(len(KINDS), dtype=np.int64)
    change[FORWARD] = 1
    change[[BACKWARD, BACKWARD_WEIGHT]] = -1
    held = change[program.columns.kind]
    trained = program.obligations.backward[:, 0]
    if len(trained):
        held = np.where(np.isin(program.columns.stage, trained), held, 0)
    starts = program.rank_starts
    return [int(np.cumsum(held[start:end]).max(initial=0)) for start, end in pairwise(starts)]


_Values = TypeVar("_Values", float, Floats)


def prediction_error(predicted: _Values, measured: _Values) -> _Values:
    """Return the relative error, predicted / measured - 1; negative if the prediction was too short."""
    return predicted / measured - 1.0


def error_text(error: float) -> str:
    """Return the error as a signed percentage; "-" without a measured value."""
    return f"{error:+.1%}" if math.isfinite(error) else "-"


# Causes of a rank without computation: it takes part in a collective, it encodes or decodes its messages, it
# copies to or from its host, it sends or receives a message, or it waits for computations of other ranks.
COLLECTIVES, CODECS, COPIES, MESSAGES, WAITING = "collectives", "codecs", "copies", "messages", "waiting"


def step_breakdown(timeline: Timeline, peer: Ints, step_s: float, *, cycle: int = 1) -> dict[str, float]:
    """Return seconds of a step by cause, the mean of all ranks; they add up to `step_s`.

    Computations count by kind, in order of registration. Collectives count where their rank does not compute
    meanwhile. Codecs count where it also takes part in no collective, then copies, and last messages. A
    message occupies both of its ranks. Steps without codecs or copies have no such cause. The rest is
    waiting: bubbles, and delays by hosts.

    Args:
        timeline: one cycle of many equal ones, each `cycle` steps after the one before; they may overlap.
        peer: the other rank of each message by position in the program, -1 for all else.
        step_s: at least the computation of the busiest rank, as a mean over the cycle.
        cycle: number of steps in the timeline.
    """
    ranks = np.unique(timeline.rank)
    if not len(ranks):
        return {}
    compute = is_compute(timeline.kind)
    other = np.asarray(peer)[timeline.position]
    message = (other != NONE) & ~compute
    alone = ~compute & ~message & ~is_collective(timeline.kind)
    codec = alone & np.isin(timeline.kind, [code for code, kind in enumerate(KINDS) if kind.stream == CODEC])
    copy = alone & ~codec
    length_ns = timeline.end_ns - timeline.start_ns
    causes: dict[str, float] = {}
    for code, kind in enumerate(KINDS):
        rows = compute & (timeline.kind == code)
        if rows.any():
            causes[kind.name] = float(length_ns[rows].sum())
    # A rank is busy with its own rows, and with messages that reach it.
    arriving = message & np.isin(other, ranks)
    place = np.searchsorted(ranks, np.concatenate((timeline.rank, other[arriving])))
    start_ns = np.concatenate((timeline.start_ns, timeline.start_ns[arriving]))
    length_ns = np.concatenate((length_ns, length_ns[arriving]))
    # In the order in which they count: computations, collectives, codecs, copies, messages.
    order = np.select([compute, codec, copy, message], [0, 2, 3, 4], default=1)
    order = np.concatenate((order, np.full(int(arriving.sum()), 4)))
    cycle_s = step_s * cycle
    covered = [
        _covered_ns(place[rows], start_ns[rows], length_ns[rows], cycle_s * 1e9)
        for rows in (order <= last for last in range(5))
    ]
    in_collective, in_codec, in_copy, in_message = np.diff(covered).tolist()
    causes[COLLECTIVES] = in_collective
    causes |= {CODECS: in_codec} if codec.any() else {}
    causes |= {COPIES: in_copy} if copy.any() else {}
    causes[MESSAGES] = in_message
    seconds = {cause: ns * 1e-9 / (len(ranks) * cycle) for cause, ns in causes.items()}
    return {**seconds, WAITING: max(0.0, step_s - sum(seconds.values()))}


def _covered_ns(place: Ints, start_ns: Ints, length_ns: Ints, period_ns: float) -> float:
    """Return the length of the union of periodic intervals in one period, over all ranks (`place`)."""
    if not len(place) or period_ns <= 0.0:
        return 0.0
    start = start_ns % period_ns
    end = start + np.minimum(length_ns, period_ns)
    # The part beyond the step covers the beginning of the next one. Ranks lie one after the other.
    beyond, first = end > period_ns, place * period_ns
    start = np.concatenate((first + start, first[beyond]))
    end = np.concatenate((first + np.minimum(end, period_ns), (first + end - period_ns)[beyond]))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate(([0.0], end[:-1]))
    return float(np.maximum(0.0, end - np.maximum(start, before)).sum())
