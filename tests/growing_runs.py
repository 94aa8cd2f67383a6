"""A run directory that a test lets grow step by step, with records of every instruction, without training."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from weft.describe.run_file import parse_run
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.program.rank_program import part_of
from weft.run.record.recorder import Recorder
from weft.training.directory.run_directory import RunDirectory

RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 64
[train]
global_batch = 8
steps = 50
[cluster]
use = "4xt4"
[plan]
pp = 2
dp = 2
"""
MILLISECOND_NS = 1_000_000


@cache
def planned_job() -> PlannedJob:
    """The job of all growing runs: 50 steps on 4 ranks."""
    return plan_run(parse_run(tomllib.loads(RUN)))


class GrowingRun:
    """A prepared run whose ranks are this object."""

    def __init__(self, path: Path) -> None:
        self.path, self.job, self.done = path, planned_job(), 0
        job = self.job
        RunDirectory(path).prepare(job)
        ranks = range(job.plan.ranks)
        parts = [part_of(job.program, rank) for rank in ranks]
        steps = job.run.train.steps
        self._recorders = [
            Recorder(path, program=part, plan_id=job.plan.plan_id, steps=steps) for part in parts
        ]
        self.tell("started", step=0, plan_id=job.plan.plan_id, held_out_loss=6.0)

    def tell(self, event: str, **details: Any) -> None:
        self._append("events.jsonl", {"time_s": 100.0 + self.done, "event": event, **details})

    def train(
        self, steps: int, *, loss: float | None = None, late_rank: int = -1, but: int | None = None
    ) -> None:
        """Finish so many steps; a late rank takes a millisecond more for each instruction.

        The rank `but` records no more than the first instruction of each step.
        """
        for _ in range(steps):
            step, own = self.done, 6.0 - 0.01 * self.done if loss is None else loss
            self._record(step, late_rank, but)
            figures = {"step_s": 0.1 + 0.001 * step, "tokens_per_s": 512.0, "max_rss_bytes": 10**8 + step}
            self._append("metrics.jsonl", {"step": step, "loss": own, "time_s": 100.0 + step, **figures})
            self.done += 1

    def resume(self, step: int) -> None:
        """Go back to a checkpoint."""
        self.done = step
        self.tell("resumed", step=step, plan_id=self.job.plan.plan_id, checkpoint=f"step-{step}")

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()

    def _record(self, step: int, late_rank: int, but: int | None) -> None:
        starts, origin = self.job.program.rank_starts, step * 10_000 * MILLISECOND_NS
        for rank, recorder in enumerate(self._recorders):
            recorder.begin(step)
            length = 2 * MILLISECOND_NS if rank == late_rank else MILLISECOND_NS
            first, end = starts[rank : rank + 2].tolist()
            for position in range(first, first + 1 if rank == but else end):
                begin = origin + (position - first) * length
                recorder.record(step, position, begin, begin, begin + length)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with open(self.path / name, "a") as file:
            file.write(json.dumps(record) + "\n")


@contextmanager
def growing(folder: Path, *names: str) -> Iterator[list[GrowingRun]]:
    """Runs of these names in a folder."""
    runs = [GrowingRun(folder / name) for name in names]
    yield runs
    for run in runs:
        run.close()
