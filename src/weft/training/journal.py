"""What a run says about itself: one JSON line per step, one per event, and the result."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import RunError
from weft.files import write_whole
from weft.run.runtime import StepResult
from weft.training.agreement import meeting_peers
from weft.training.run_directory import RunDirectory

# Steps that are not measured: caches fill, pages are touched, connections open.
WARM_UP_STEPS = 5


class Journal:
    """Rank 0's lines in `metrics.jsonl` and `events.jsonl`; the other ranks' calls do nothing.

    A step's line is written while the next step is under way elsewhere: reading a step's loss waits for the
    slowest rank, so it is read only when another step has gone by.
    """

    def __init__(self, run_dir: Path, *, writes: bool) -> None:
        self._run_dir = run_dir
        self._writes = writes
        self._pending: tuple[StepResult, dict[str, Any]] | None = None

    def step(self, result: StepResult, **metrics: Any) -> None:
        """Keep a finished step's figures and write those of the step before."""
        self.flush()
        if self._writes:
            self._pending = (result, {**metrics, "time_s": time.time(), "max_rss_bytes": max_rss_bytes()})

    def flush(self) -> None:
        """Write the figures that are still kept.

        Raises:
            RunError: when the loss is not finite: nothing trained after that step is worth anything.
        """
        if self._pending is None:
            return
        result, metrics = self._pending
        self._pending = None
        with meeting_peers():
            loss = result.loss
        if not math.isfinite(loss):
            self.event("diverged", step=result.step)
            raise RunError(f"step {result.step}: the loss is {loss}; try a lower optimizer.learning_rate")
        self._append("metrics.jsonl", {"step": result.step, "loss": loss, **metrics})

    def event(self, event: str, **details: Any) -> None:
        if self._writes:
            self._append("events.jsonl", {"time_s": time.time(), "event": event, **details})

    def finish(self, *, tokens_per_step: int, rss_bytes: Sequence[int], **results: Any) -> None:
        """Write `result.json`.

        The step time is the median over all steps of the run after the warm-up; of a run that was no longer
        than the warm-up it is the last step's.
        """
        self.flush()
        if not self._writes:
            return
        rows = RunDirectory(self._run_dir).metrics()
        warm_up = min(WARM_UP_STEPS, len(rows) - 1)
        step_s = statistics.median(row["step_s"] for row in rows[warm_up:])
        record = {
            **results,
            "measured_step_s": step_s,
            "tokens_per_s": tokens_per_step / step_s,
            "max_rss_bytes": list(rss_bytes),
        }
        write_whole(self._run_dir / "result.json", json.dumps(record, indent=1, sort_keys=True) + "\n")

    def _append(self, name: str, record: dict[str, Any]) -> None:
        """Add one line, and first end a line that a kill has torn."""
        with open(self._run_dir / name, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                torn = file.read(1) != b"\n"
            else:
                torn = False
            file.write((b"\n" if torn else b"") + json.dumps(record).encode() + b"\n")


def max_rss_bytes() -> int:
    """The most memory that this process has had in use."""
    if sys.platform == "linux":
        # `getrusage` would count the parent's memory before this process replaced its image.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
