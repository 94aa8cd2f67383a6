"""Where a step goes: every moment of every rank has one cause."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.program.kinds import KINDS, is_compute
from weft.program.program import NONE, Ints
from weft.timeline.timeline import Timeline

# What a rank that computes nothing does: it takes part in a collective, a message of its is on its way, or
# it waits for what others have not yet computed.
COLLECTIVES, MESSAGES, WAITING = "collectives", "messages", "waiting"


def step_breakdown(timeline: Timeline, peer: Ints, step_s: float) -> dict[str, float]:
    """Seconds of a step by cause, the mean of all ranks; they add up to `step_s`.

    Computations count by kind, in order of registration. Collectives and messages count where their rank
    computes nothing meanwhile, messages only where it takes part in no collective; a message occupies both of
    its ranks. What is left is waiting: bubbles, and what a host lost.

    Args:
        timeline: one step of many equal ones, each `step_s` after the one before; they may overlap.
        peer: the other rank of each message by position in the program, -1 for all else.
        step_s: at least what the busiest rank computes.
    """
    ranks = np.unique(timeline.rank)
    if not len(ranks):
        return {}
    compute = is_compute(timeline.kind)
    other = np.asarray(peer)[timeline.position]
    message = (other != NONE) & ~compute
    length_ns = timeline.end_ns - timeline.start_ns
    causes: dict[str, float] = {}
    for code, kind in enumerate(KINDS):
        rows = compute & (timeline.kind == code)
        if rows.any():
            causes[kind.name] = float(length_ns[rows].sum())
    causes |= {COLLECTIVES: 0.0, MESSAGES: 0.0}
    for rank in ranks.tolist():
        own = timeline.rank == rank
        covered = _covered_ns(timeline, own & compute, step_s)
        for cause, rows in (
            (COLLECTIVES, own & ~message),
            (MESSAGES, own | (message & (other == rank))),
        ):
            more = _covered_ns(timeline, rows, step_s)
            causes[cause] += more - covered
            covered = more
    seconds = {cause: ns * 1e-9 / len(ranks) for cause, ns in causes.items()}
    return {**seconds, WAITING: max(0.0, step_s - sum(seconds.values()))}


def _covered_ns(timeline: Timeline, rows: npt.NDArray[np.bool_], step_s: float) -> float:
    """Length of the union of the rows' intervals and of those of all other steps, within one step."""
    period = step_s * 1e9
    if not rows.any() or period <= 0.0:
        return 0.0
    start = timeline.start_ns[rows] % period
    end = start + np.minimum(timeline.end_ns[rows] - timeline.start_ns[rows], period)
    # What reaches beyond the step covers the beginning of the next one.
    start = np.concatenate((start, np.zeros(int((end > period).sum()))))
    end = np.concatenate((np.minimum(end, period), end[end > period] - period))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate(([0.0], end[:-1]))
    return float(np.maximum(0.0, end - np.maximum(start, before)).sum())
