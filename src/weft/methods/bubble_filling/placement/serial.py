"""All work at the end of one step: what training does without bubbles to fill."""

from __future__ import annotations

from collections.abc import Sequence

from weft.methods.bubble_filling.gaps import in_order
from weft.methods.bubble_filling.work import DeviceStep, Placed, Window, WorkItem


def serial(step: DeviceStep, items: Sequence[WorkItem], *, steps: int = 1) -> Window:
    """Place all work behind the first step of the window.

    Args:
        step, items: the device's step and the work of a window.
        steps: the window, the interval at which the work is done.
    """
    placed: list[Placed] = []
    time = step.end_s
    for item in in_order(items):
        for piece, seconds in enumerate(items[item].pieces_s):
            placed.append(Placed(0, len(step.busy) - 1, time, item, piece))
            time += seconds
    return Window(steps, tuple(placed), time - step.end_s)
