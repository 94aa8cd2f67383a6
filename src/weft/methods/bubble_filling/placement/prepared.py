"""Gaps and items in the form that sweeps read, and the fewest steps that they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from weft.methods.bubble_filling.gaps import Bubble, followers, gaps_of, ready_gaps
from weft.methods.bubble_filling.work import DeviceStep, WorkItem

# A number of steps, or of pieces in a gap, that is whole but for the rounding of sums.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Work:
    """Gaps and items in the form that sweeps read.

    Attributes:
        step: the device's step.
        items: the work.
        factor: 1 + margin.
        gaps: those that hold a piece, and the last one of the step, which may be empty.
        queues: by item, its pieces in the order of their passes.
        forward, backward: what a sweep reads of the items, in time and in mirrored time.
        long: the items with a piece that is longer than every gap.
        smallest_s: the shortest piece.
        work_s, idle_s: all pieces together, and all gaps of a step.
    """

    step: DeviceStep
    items: Sequence[WorkItem]
    factor: float
    gaps: tuple[Bubble, ...]
    queues: tuple[tuple[int, ...], ...]
    forward: Directed
    backward: Directed
    long: frozenset[int]
    smallest_s: float
    work_s: float
    idle_s: float

    @classmethod
    def of(cls, step: DeviceStep, items: Sequence[WorkItem], margin: float) -> Work:
        factor, last = 1 + margin, len(step.busy) - 1
        smallest_s = min((min(item.pieces_s) for item in items), default=inf)
        gaps = [gap for gap in gaps_of(step) if gap.behind < last and gap.length_s >= factor * smallest_s]
        tail_s = step.busy[last].end_s if step.busy else 0.0
        gaps.append(Bubble(last, min(tail_s, step.end_s), step.end_s))
        longest_s = max(gap.length_s for gap in gaps)
        ready = ready_gaps(step, items, gaps)
        queues = tuple(tuple(sorted(range(len(of)), key=of.__getitem__)) for of in ready)
        forward, backward = Directed.both(items, queues, ready, len(gaps))
        long = frozenset(one for one, item in enumerate(items) if factor * max(item.pieces_s) > longest_s)
        work_s, idle_s = sum(sum(item.pieces_s) for item in items), sum(gap.length_s for gap in gaps)
        return cls(
            step,
            items,
            factor,
            tuple(gaps),
            queues,
            forward,
            backward,
            long,
            smallest_s,
            work_s,
            idle_s,
        )

    def least_steps(self) -> int:
        """Return a number of steps that no window without longer steps undercuts, from the sizes of pieces.

        In a gap, pieces of at least one size need their sum and the margin of that size.
        """
        sizes = sorted(
            (size for one, item in enumerate(self.items) if one not in self.long for size in item.pieces_s),
            reverse=True,
        )
        least, sum_s, before = 1, 0.0, inf
        for number, size in enumerate(sizes, start=1):
            sum_s += size
            # Sizes that are nearly the same say the same.
            last = number == len(sizes)
            if size > 0 and (last or (sizes[number] < size and size < 0.95 * before)):
                before = size
                margin_s = (self.factor - 1) * size
                idle = [gap.length_s - margin_s for gap in self.gaps if gap.length_s >= self.factor * size]
                whole = sum(int(one / size + ROUNDING) for one in idle)
                steps = max(sum_s / sum(idle), number / whole)
                least = max(least, ceil(steps - ROUNDING))
        return least


@dataclass(frozen=True)
class Directed:
    """Items as a sweep in one direction of time meets them.

    Attributes:
        seconds: by item and place in its queue, the piece's time.
        ready: by item and place in its queue, the first gap in which the piece may be placed.
        needs: by item, the items that it comes behind.
        behind: by item, the items that come behind it.
    """

    seconds: tuple[tuple[float, ...], ...]
    ready: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    behind: tuple[tuple[int, ...], ...]

    @classmethod
    def both(
        cls,
        items: Sequence[WorkItem],
        queues: Sequence[Sequence[int]],
        ready: Sequence[Sequence[int]],
        gaps: int,
    ) -> tuple[Directed, Directed]:
        """Return the items in time and in mirrored time, of their ready gaps in a step of `gaps` gaps."""
        seconds = [
            tuple(item.pieces_s[one] for one in queue) for item, queue in zip(items, queues, strict=True)
        ]
        sorted_ready = [tuple(of[one] for one in queue) for of, queue in zip(ready, queues, strict=True)]
        # A pass comes again in the step behind the window; before it, in mirrored time, nothing is ready.
        mirrored = [
            tuple(gaps - one for one in reversed(of)) if item.follows else of
            for item, of in zip(items, sorted_ready, strict=True)
        ]
        needs, behind = [item.after for item in items], followers(items)
        return (
            cls(tuple(seconds), tuple(sorted_ready), tuple(needs), behind),
            cls(tuple(of[::-1] for of in seconds), tuple(mirrored), behind, tuple(needs)),
        )
