"""The micro-batches that the devices of a pipeline keep at once, which decide the bytes of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.predict.cost.residency import kept_changes
from weft.program.arrays import Ints
from weft.program.codes import distinct_rows
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD, is_any_of
from weft.program.program import NONE
from weft.program.schedules.base import ComputeOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMicroBatches:
    """The combinations of micro-batches that devices keep at once and that may need most, device by device.

    Arrays but `first` have shape (combinations, most stages of a device). A device with fewer stages counts
    none in the rest.

    Attributes:
        first: the first combination of each device, shape (devices,).
        stages: the stages of the combination's device.
        left: the micro-batches after their forward pass.
        whole: the micro-batches before their weight part.
        taken: 1 for the stage with a backward pass that begins now.
    """

    first: Ints
    stages: Ints
    left: Ints
    whole: Ints
    taken: Ints

    @classmethod
    def of(cls, orders: Sequence[ComputeOrder]) -> KeptMicroBatches:
        """Find the combinations in the orders of all devices."""
        stages = [np.flatnonzero(np.bincount(order.stage)) for order in orders]
        places = max(map(len, stages))
        kept = [_combinations(*pair, places) for pair in zip(orders, stages, strict=True)]
        counts = np.array([len(one) for one in kept], dtype=np.int64)
        left, whole, taken = np.moveaxis(np.concatenate(kept), 1, 0)
        mine = np.stack([np.pad(one, (0, places - len(one))) for one in stages])
        return cls(
            first=np.cumsum(counts) - counts,
            stages=np.repeat(mine, counts, axis=0),
            left=left,
            whole=whole,
            taken=taken,
        )

    def most(self, left: Ints, whole: Ints, taken: Ints) -> Ints:
        """Return the most bytes at once on each device, from bytes per micro-batch of each stage, by kind."""
        mine = self.stages
        held = self.left * left[mine] + self.whole * whole[mine] + self.taken * taken[mine]
        return np.maximum.reduceat(held.sum(axis=1), self.first)


def _combinations(order: ComputeOrder, stages: Ints, places: int) -> Ints:
    """Return (left, whole, taken) of the combinations of one device, shape (combinations, 3, places).

    A device keeps most when a backward begins. Combinations below the one before them are left out.
    """
    here = order.stage == np.pad(stages, (0, places - len(stages)), constant_values=NONE)[:, np.newaxis]
    # Moments lie side by side: sums along a short axis take ten times as long.
    changes = _CHANGES.take(order.kind, axis=1)[:, np.newaxis] * here
    ends = np.flatnonzero(order.kind != FORWARD)
    kept = (np.cumsum(changes, axis=2) - changes).take(ends, axis=2)
    taken = (is_any_of(order.kind, (BACKWARD, BACKWARD_INPUT)) * here).take(ends, axis=1)
    moments = np.concatenate([*kept, taken])
    above = np.append(True, (moments[:, 1:] > moments[:, :-1]).any(axis=0))
    peaks = moments[:, above]
    different: Ints = peaks[:, distinct_rows(*peaks)[0]].T.reshape(-1, 3, places)
    return different


def _changes() -> Ints:
    """Return the change of (left, whole) by each kind of computation, shape (2, kinds)."""
    by_kind = kept_changes(np.array([1, 0]), np.array([0, 1]))
    changes = np.zeros((2, max(by_kind) + 1), dtype=np.int64)
    for kind, change in by_kind.items():
        changes[:, kind] = change
    return changes


_CHANGES = _changes()
