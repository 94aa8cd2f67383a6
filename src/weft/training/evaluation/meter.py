"""`Meter`: a task's metrics over held-out samples, computed with the last stage's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from weft.run.resources import LossFunction
from weft.training.coordination.agreement import gather
from weft.training.tasks.base import Outputs, Task

Metrics = Mapping[str, float]


class Meter:
    """A wrapper of a task's loss; while it is open, every call also adds the metrics of its micro-batch.

    Only ranks with a last stage have outputs. If several have the same outputs, all of them count equally.
    """

    def __init__(self, task: Task) -> None:
        self._loss: LossFunction = task.loss
        self.takes_divided_logits = getattr(task, "takes_divided_logits", False)
        self.takes_divided_tokens = getattr(task, "takes_divided_tokens", False)
        self._metrics: Callable[[Outputs, torch.Tensor], Metrics] | None = getattr(task, "metrics", None)
        self._open = False
        self._sums: dict[str, float] = {}
        self._micro_batches = 0

    def __call__(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the task's loss, mean over one micro-batch."""
        if self._open and self._metrics is not None:
            for name, value in self._metrics(outputs.detach(), targets).items():
                self._sums[name] = self._sums.get(name, 0.0) + float(value)
            self._micro_batches += 1
        return self._loss(outputs, targets)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Reset the sums and count until the end of the block."""
        self._sums, self._micro_batches = {}, 0
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def collect(self) -> dict[str, float]:
        """Return the means over all ranks' micro-batches by name; every rank calls it."""
        counted = gather((self._sums, self._micro_batches))
        micro_batches = sum(count for _, count in counted)
        names = sorted({name for sums, _ in counted for name in sums})
        return {name: sum(sums.get(name, 0.0) for sums, _ in counted) / micro_batches for name in names}
