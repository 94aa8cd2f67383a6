"""Breakdown of a step: every moment of every rank has one cause."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, is_collective, is_compute
from weft.program.program import NONE
from weft.timeline.timeline import Timeline

# Causes of a rank without computation: it takes part in a collective, it copies to or from its host, it sends
# or receives a message, or it waits for computations of other ranks.
COLLECTIVES, COPIES, MESSAGES, WAITING = "collectives", "copies", "messages", "waiting"


def step_breakdown(timeline: Timeline, peer: Ints, step_s: float, *, cycle: int = 1) -> dict[str, float]:
    """Return seconds of a step by cause, the mean of all ranks; they add up to `step_s`.

    Computations count by kind, in order of registration. Collectives count where their rank does not compute
    meanwhile. Copies count where their rank also takes part in no collective, messages where it also copies
    nothing. A message occupies both of its ranks. Steps without copies have no such cause. The rest is
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
    copy = ~compute & ~message & ~is_collective(timeline.kind)
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
    computing = np.concatenate((compute, np.zeros(int(arriving.sum()), dtype=np.bool_)))
    messaging = np.concatenate((message, np.ones(int(arriving.sum()), dtype=np.bool_)))
    copying = np.concatenate((copy, np.zeros(int(arriving.sum()), dtype=np.bool_)))
    cycle_s = step_s * cycle
    in_computation, in_collective, in_copy, in_message = (
        _covered_ns(place[rows], start_ns[rows], length_ns[rows], cycle_s * 1e9)
        for rows in (computing, ~messaging & ~copying, ~messaging, np.ones_like(computing))
    )
    copies = {COPIES: in_copy - in_collective} if copy.any() else {}
    causes |= {COLLECTIVES: in_collective - in_computation, **copies, MESSAGES: in_message - in_copy}
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
