"""The records of a run: one JSON line per step, one per event, and the result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from weft.errors import RunError
from weft.files import append_record, write_whole
from weft.run.step_result import StepResult
from weft.timeline.medians import typical_step_s
from weft.training.coordination.agreement import meeting_peers
from weft.training.directory.process_memory import ProcessMemory
from weft.training.directory.run_directory import RunDirectory, held_out_record, plan_since
from weft.training.loggers.feed import FINISH_TIMEOUT_S, Feeds

# Steps that are not measured: caches fill, pages are touched, connections open.
WARM_UP_STEPS = 5
CPU = torch.device("cpu")
# A failed run does not wait for loggers longer than this.
FAILED_TIMEOUT_S = 2.0


class Journal:
    """Rank 0's lines in `metrics.jsonl` and `events.jsonl`; the other ranks' calls do nothing.

    A step's line is written one step later: a read of the loss waits for the slowest rank. By then the other
    ranks are in the next step.

    Use it as a context manager: its exit lets the loggers finish.
    """

    def __init__(self, run_dir: Path, *, writes: bool, memory: ProcessMemory | None = None) -> None:
        self._run_dir = run_dir
        self._memory = memory or ProcessMemory(CPU)
        self._writes = writes
        self._pending: tuple[StepResult, dict[str, Any]] | None = None
        self._feeds = Feeds()

    def report_to(self, feeds: Feeds) -> None:
        """Send every later record to the run's loggers, too."""
        self._feeds = feeds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._feeds.close(FINISH_TIMEOUT_S if kind is None else FAILED_TIMEOUT_S)

    def step(self, result: StepResult, **metrics: Any) -> None:
        """Keep a finished step's figures and write the figures of the step before."""
        self.flush()
        if self._writes:
            about = {"time_s": time.time(), **self._memory.peaks()}
            self._pending = (result, {**metrics, **about})

    def flush(self) -> None:
        """Write the figures that are still kept, or an event for a step without an update or a replica.

        Raises:
            RunError: if the loss of no replica is finite: no later step can be of use.
        """
        if self._pending is None:
            return
        result, metrics = self._pending
        self._pending = None
        with meeting_peers():
            loss, series = result.loss, result.series
        metrics |= result.figures | {name: _number(total) for name, total in result.totals.items()}
        if result.left_out:
            self.event("left out", step=result.step, gradient_norm=str(result.gradient_norm))
            return
        if not math.isfinite(loss) and result.lost_ranks:
            self.event("replicas lost", step=result.step, ranks=list(result.lost_ranks))
            return
        if not math.isfinite(loss):
            self.event("diverged", step=result.step)
            raise RunError(f"step {result.step}: the loss is {loss}; try a lower optimizer.learning_rate")
        rows = {name: [_number(value) for value in values] for name, values in series.items()}
        record = {"step": result.step, "loss": loss, **metrics, **rows}
        append_record(self._run_dir / "metrics.jsonl", record)
        self._feeds.step(record)

    def event(self, event: str, **details: Any) -> None:
        """Write an event; one with a `held_out_loss` goes to the loggers, too, after all earlier steps."""
        if not self._writes:
            return
        RunDirectory(self._run_dir).tell(event, **details)
        held_out = held_out_record(details)
        if held_out is not None:
            self.flush()
            self._feeds.held_out(held_out)

    def finish(
        self,
        *,
        tokens_per_step: float,
        memory: Sequence[Mapping[str, int]],
        steps_per_cycle: int = 1,
        **results: Any,
    ) -> None:
        """Write `result.json`.

        The step time is the median over all steps of the run's plan after the warm-up. If there are no more
        steps than the warm-up's, it is the last step's. For a program with a cycle of several steps, it is
        the mean of their typical times. `memory` has each rank's `ProcessMemory.peaks`.

        Raises:
            RunError: if no step was taken.
        """
        self.flush()
        if not self._writes:
            return
        directory = RunDirectory(self._run_dir)
        recorded = directory.metrics()
        if not recorded:
            raise RunError("every step was left out: the gradient was never finite")
        since = plan_since(directory.events())
        rows = [row for row in recorded if row["step"] >= since] or recorded
        counted = rows[max(0, min(WARM_UP_STEPS, len(rows) - steps_per_cycle)) :]
        steps, seconds = ([row[name] for row in counted] for name in ("step", "step_s"))
        step_s = typical_step_s(steps, seconds, steps_per_cycle)
        record = {
            **results,
            "measured_step_s": step_s,
            "tokens_per_s": tokens_per_step / step_s,
            **{name: [one[name] for one in memory] for name in memory[0]},
        }
        write_whole(self._run_dir / "result.json", json.dumps(record, indent=1, sort_keys=True) + "\n")


def _number(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None
