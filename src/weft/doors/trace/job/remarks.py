"""Remarks on the losses of a job, one line each, with the change that each of them asks for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.describe.units import format_seconds
from weft.doors.trace.job.losses import (
    EQUAL_STAGES,
    LEAST_SLOWDOWN,
    NO_DELAYS,
    WORST_WORKERS,
    Losses,
    Worker,
)
from weft.doors.trace.job.operations import OPERATIONS, PASSES, TYPES

# MegaScale (arXiv 2402.15627, section 5) calls a machine slow that takes so much longer than its peers.
SLOW_WORKER = 1.05
_DELAYS, _OPERATION, _VARIATION, _OUTLYING_STEP = 0.02, 1.005, 0.05, 1.05
_SHOWN = 4


def remarks(losses: Losses) -> list[str]:
    """Return remarks on the losses; the largest gains come first."""
    lines = [_whole(losses)]
    if losses.slowdown >= LEAST_SLOWDOWN:
        lines += _stages(losses)
        lines += _workers(losses)
    lines += _rest(losses)
    return lines


def _whole(losses: Losses) -> str:
    measured_s, ideal_s = float(losses.measured_s.mean()), losses.ideal_s
    text = f"a step takes {format_seconds(measured_s)}, an ideal one {format_seconds(ideal_s)}"
    if losses.slowdown < LEAST_SLOWDOWN:
        return f"{text}: ranks and stages are alike, so that nothing is to be gained from them"
    return f"{text}: operations of unusual length make it {losses.slowdown - 1.0:.0%} longer"


def _stages(losses: Losses) -> Iterator[str]:
    slowest = max(losses.by_stage, key=lambda one: losses.by_stage[one])
    if losses.by_stage[slowest] < LEAST_SLOWDOWN:
        return
    passes_s = losses.times_s[list(PASSES)].sum(axis=0)
    others_s = float(np.delete(passes_s, slowest).mean()) if len(passes_s) > 1 else float(passes_s[slowest])
    after_s, now_s = losses.what_if_s[EQUAL_STAGES], losses.what_if_s[NO_DELAYS]
    if passes_s[slowest] <= others_s * LEAST_SLOWDOWN:
        return
    holds = ", which has the loss" if slowest == len(passes_s) - 1 else ""
    yield (
        f"stage {slowest}{holds}: {format_seconds(float(passes_s[slowest]))} forward and backward, the "
        f"others {format_seconds(others_s)} in the mean. Give it fewer layers: with equal stages a "
        f"step takes {format_seconds(after_s)} ({after_s / now_s - 1.0:+.0%})"
    )


def _workers(losses: Losses) -> Iterator[str]:
    slow = sorted(
        (one for one in losses.workers if one.against_peers > SLOW_WORKER),
        key=lambda one: -one.against_peers,
    )
    if not slow:
        return
    after_s, now_s = losses.what_if_s[WORST_WORKERS], losses.what_if_s[NO_DELAYS]
    gain = f"; usual times of the worst make a step {format_seconds(after_s)} ({after_s / now_s - 1.0:+.0%})"
    more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
    named = ", ".join(_worker(one) for one in slow[:_SHOWN])
    yield f"slower than the same stage of other replicas: {named}{more}. Look at their devices{gain}"


def _worker(worker: Worker) -> str:
    return f"stage {worker.stage} of replica {worker.replica} ({worker.against_peers - 1.0:+.0%})"


def _rest(losses: Losses) -> Iterator[str]:
    if losses.delay_share >= _DELAYS:
        yield (
            f"{losses.delay_share:.1%} of a step lies between operations: late data, collections of garbage, "
            "or hosts that synchronise"
        )
    if losses.variation >= _VARIATION:
        yield (
            f"passes of one stage differ by {losses.variation:.0%} within a step: unequal samples; "
            "deal them evenly to micro-batches"
        )
    passes = {OPERATIONS[one].name for one in PASSES}
    for name, slowdown in sorted(losses.by_operation.items(), key=lambda item: -item[1]):
        if slowdown >= _OPERATION and name not in passes:
            yield f"{name} adds {slowdown - 1.0:.1%}{_worst_steps(losses, name)}"


def _worst_steps(losses: Losses, name: str) -> str:
    """Return the steps in which a type of operation takes far longer than usual, in words."""
    operations = losses.operations
    mine = operations.type == TYPES[name]
    steps, seconds = operations.step[mine], (operations.end_s - operations.start_s)[mine]
    longest = np.zeros(len(operations.steps))
    np.maximum.at(longest, steps, seconds)
    far = np.flatnonzero(longest > _OUTLYING_STEP * np.median(longest))
    if not len(far) or len(far) > len(longest) // 4:
        return ""
    shown = far[np.argsort(-longest[far], kind="stable")][:_SHOWN]
    return (
        f", most in step{'s' if len(shown) > 1 else ''} {', '.join(str(operations.steps[i]) for i in shown)}"
    )
