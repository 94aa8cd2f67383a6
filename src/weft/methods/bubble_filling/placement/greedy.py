"""weft's greedy way to place work: sweeps in several orders, forward and backward in time.

In backward sweeps, long pieces at the end of chains take their gaps before short ones fill them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.methods.bubble_filling.gaps import ancestors, in_order
from weft.methods.bubble_filling.placement.official import official
from weft.methods.bubble_filling.placement.prepared import Directed, Work
from weft.methods.bubble_filling.placement.sweep import Sweep
from weft.methods.bubble_filling.work import DeviceStep, Window, WorkItem


def greedy(
    step: DeviceStep, items: Sequence[WorkItem], *, margin: float = 0.05, most_steps: int = 64
) -> Window:
    """Place work in the fewest steps that a sweep finds; never in more than the published way.

    A piece starts so early that (1 + margin) times its seconds fit before the next computation. An item with
    a piece longer than every gap makes steps longer, alone. So does what does not fit in `most_steps`.

    Args:
        step, items, margin, most_steps: as of a `Placer`; the order of items is one of those tried.
    """
    work = Work.of(step, items, margin)
    published: Window | None = None
    steps, limit = work.least_steps(), most_steps + 1
    while steps < limit:
        window = _window(work, steps)
        if window is not None:
            return window
        if published is None:
            published = official(step, items, margin=margin, most_steps=most_steps)
            if published.added_s == 0:
                limit = published.steps
        steps += 1
    return _capped(work, most_steps) if published is None or published.added_s else published


def _window(work: Work, steps: int) -> Window | None:
    """Return the window of the sweep that makes steps least longer; None if no sweep places all."""
    longer: list[Window] = []
    for sweep in _sweeps(work, steps):
        if not sweep.run():
            window = sweep.window()
            if window.added_s == 0:
                return window
            longer.append(window)
    return min(longer, key=lambda window: window.added_s, default=None)


def _sweeps(work: Work, steps: int) -> Iterator[Sweep]:
    """Yield the sweeps to try for a window of so many steps."""
    listed = range(len(work.items))
    longest = [max(item.pieces_s) for item in work.items]
    # Forward sweeps leave results that are less old.
    for backward in (False,) if work.long else (False, True):
        items = work.backward if backward else work.forward
        rest = _chains(items)
        orders = {
            tuple(sorted(listed, key=lambda one: -rest[one])): None,
            tuple(sorted(listed, key=lambda one: (-longest[one], -items.ready[one][-1]))): None,
            tuple(reversed(listed) if backward else listed): None,
        }
        for order in orders:
            yield Sweep(work, steps, order, backward=backward, spilled=work.long)


def _chains(items: Directed) -> list[float]:
    """Return, for each item, the seconds of the longest chain that begins with it."""
    found: dict[int, float] = {}

    def of(item: int) -> float:
        if item not in found:
            found[item] = sum(items.seconds[item]) + max((of(one) for one in items.behind[item]), default=0.0)
        return found[item]

    return [of(item) for item in range(len(items.seconds))]


def _capped(work: Work, steps: int) -> Window:
    """Return a window of so many steps; items that do not fit end behind its last step."""
    before, unwrapped = ancestors(work.items), frozenset[int]()
    while True:
        spilled = work.long | unwrapped
        order = in_order(work.items)
        sweep = Sweep(work, steps, order, spilled=spilled, unwrapped=unwrapped)
        left = sweep.run()
        if not left:
            return sweep.window()
        unwrapped = unwrapped.union(left, *(before[one] for one in left))
