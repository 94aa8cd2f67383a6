"""`CheckedSchedule`: a schedule of another package, whose answers are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.errors import InputError, Violation
from weft.installed import failure
from weft.program.arrays import Ints
from weft.program.kinds import COMPUTATIONS
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, Schedule, paths_of, placements


class CheckedSchedule:
    """A schedule with the members of another one; each wrong answer raises an `InputError` with its name."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self.__doc__ = schedule, schedule.__doc__

    def __getattr__(self, name: str) -> Any:
        # Copies ask for such names before they have a schedule.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._schedule, name)

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        """Return the other schedule's reason.

        Raises:
            InputError: when it fails.
        """
        reason: str | None = self._asked("refuse", self._schedule.refuse, pipeline, options)
        return reason

    def placement(self, pipeline: Pipeline) -> Ints:
        """Return the other schedule's placement.

        Raises:
            InputError: when it fails, or gives no device of the pipeline for each stage.
        """
        paths, found = (
            paths_of(self._schedule),
            self._asked("placement", placements, self._schedule, pipeline),
        )
        if found.dtype.kind not in "iu" or found.shape != (paths, pipeline.stages):
            raise self._wrong(f"placement returns no device for each of {pipeline.stages} stages")
        placed: Ints = found[0] if paths == 1 else found
        if not _counts_below(placed, pipeline.devices):
            raise self._wrong(f"placement returns {placed.tolist()}; devices are 0 to {pipeline.devices - 1}")
        return placed

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        """Return the other schedule's order.

        Raises:
            InputError: when it fails, or is no arrays of kinds, stages and micro-batches of the pipeline.
        """
        found = self._asked("order", self._schedule.order, pipeline, device, options)
        columns = found if isinstance(found, tuple) else ()
        arrays = (isinstance(one, np.ndarray) and one.dtype.kind in "iu" for one in columns)
        if len(columns) != 3 or not all(arrays) or len({one.shape for one in columns}) > 1:
            raise self._wrong("order returns no ComputeOrder of three integer arrays of equal length")
        order = ComputeOrder(*columns)
        if not np.isin(order.kind, [*COMPUTATIONS]).all():
            raise self._wrong("order returns a kind that is no computation")
        for name, most in (("stage", pipeline.stages), ("micro_batch", pipeline.micro_batches)):
            if not _counts_below(getattr(order, name), most):
                raise self._wrong(f"order returns a {name} that is not among 0 to {most - 1}")
        return order

    def _asked(self, member: str, method: Callable[..., Any], *words: Any) -> Any:
        try:
            return method(*words)
        except InputError:
            raise
        except Exception as error:
            raise self._wrong(f"{member} fails: {failure(error)}") from error

    def _wrong(self, problem: str) -> InputError:
        return InputError(Violation(f"schedule {self._schedule.name}", problem))


def _counts_below(values: Ints, most: int) -> bool:
    return bool(((values >= 0) & (values < most)).all())
