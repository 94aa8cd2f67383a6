"""Work for the gaps of a device's step, and windows: where each piece of it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PassName = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Busy:
    """A computation of a device's step.

    Attributes:
        start_s, end_s: seconds from the begin of the step.
        ends: the pass whose result it completes for work that follows; None: of no pass.
        stage, micro_batch: of that pass; -1 where `ends` is None.
    """

    start_s: float
    end_s: float
    ends: PassName | None = None
    stage: int = -1
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The computations of a device in one predicted or measured step, in order; the step repeats.

    Attributes:
        busy: the computations, sorted by start, without overlap.
        end_s: the length of the step. Time from the last computation to here is a gap, too.
    """

    busy: tuple[Busy, ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Work that is done once in a window: one piece for each micro-batch, or pieces of any moment.

    Attributes:
        name: of its kind and place, for people.
        stage: the stage it belongs to.
        pieces_s: seconds of each piece, in order.
        micro_batches: the micro-batch of each piece; empty: pieces belong to none.
        follows: the pass of its micro-batch, in the first step of the window, that piece i needs; None: none.
        after: places, in the list of items, of items all of whose pieces come before any of this one's.
    """

    name: str
    stage: int
    pieces_s: tuple[float, ...]
    micro_batches: tuple[int, ...] = ()
    follows: PassName | None = None
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """One piece in a gap.

    Attributes:
        step: of the window, from 0.
        behind: place in `DeviceStep.busy` of the computation before the gap; -1: the gap at the step's begin.
        start_s: from the begin of that step.
        item, piece: which.
    """

    step: int
    behind: int
    start_s: float
    item: int
    piece: int


@dataclass(frozen=True)
class Window:
    """The steps in which a device does all work once; windows repeat.

    Attributes:
        steps: R, the number of steps.
        placed: every piece of every item once, sorted by step and start.
        added_s: seconds by which the work that fits nowhere makes steps longer, over the whole window.
    """

    steps: int
    placed: tuple[Placed, ...]
    added_s: float = 0.0


class Placer(Protocol):
    """A way to put work into gaps.

    Args:
        step, items: the device's step and the work of a window.
        margin: the share by which a piece may take longer before it delays the next computation.
        most_steps: the largest window; the rest of the work makes steps longer.
    """

    def __call__(
        self, step: DeviceStep, items: Sequence[WorkItem], *, margin: float = 0.05, most_steps: int = 64
    ) -> Window: ...
