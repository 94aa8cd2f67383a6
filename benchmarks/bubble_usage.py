"""Figures of a window: how busy the device is, and how old the statistics are."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from weft.methods.bubble_filling.cyclic import turns_of
from weft.methods.bubble_filling.work import DeviceStep, Window, WorkItem


def busy_s(step: DeviceStep) -> float:
    """Return the seconds of a step's computations."""
    return sum(one.end_s - one.start_s for one in step.busy)


def work_s(items: Sequence[WorkItem]) -> float:
    """Return the seconds of all work of a window."""
    return sum(sum(item.pieces_s) for item in items)


def utilisation(step: DeviceStep) -> float:
    """Return the busy share of a step without work in its gaps."""
    return busy_s(step) / step.end_s


def filled_utilisation(step: DeviceStep, items: Sequence[WorkItem], window: Window) -> float:
    """Return the published usage: computations and work over the window's steps as they are without work.

    It is above 1 only where the window makes steps longer.
    """
    return busy_s(step) / step.end_s + work_s(items) / (step.end_s * window.steps)


def refresh_ratio(step: DeviceStep, items: Sequence[WorkItem]) -> float:
    """Return the work over a step's idle time: no window has fewer steps, unless it makes them longer."""
    idle_s, needed_s = step.end_s - busy_s(step), work_s(items)
    if needed_s == 0:
        return 0.0
    return needed_s / idle_s if idle_s > 0 else inf


def least_steps(step: DeviceStep, items: Sequence[WorkItem]) -> float:
    """Return the refresh ratio as a whole number of steps, at least 1; infinity without idle time."""
    ratio = refresh_ratio(step, items)
    # Sums of times in another order may differ in the last digits.
    return inf if ratio == inf else max(1, ceil(ratio * (1 - 1e-12)))


def completed_after(step: DeviceStep, items: Sequence[WorkItem], window: Window) -> tuple[int, ...]:
    """Return, for each item, the steps from its captures to the end of its last piece.

    A result is used until the next one. So its captures are at most as old as these steps and a window's
    together, less one.
    """
    placed = window.placed
    turns = [max(of) for of in turns_of(step, items, placed)]
    return tuple(turn // len(placed) * window.steps + placed[turn % len(placed)].step for turn in turns)
