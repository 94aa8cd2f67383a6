"""Runs at a glance: the state and the newest figures of each run directory in a folder. It only reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from weft.run.launch.failures import logs_folder
from weft.training.directory.live_run import LiveRun
from weft.training.directory.run_directory import plan_since
from weft.training.directory.run_lock import is_running

# The most steps whose median tells the speed of a run.
NEWEST_STEPS = 20


class RunState(StrEnum):
    """The state of a run directory: going on, or ended in one of three ways."""

    PREPARED = "prepared"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    BROKEN_OFF = "broken off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """One run: its plan, its progress, and its newest figures; None where it has none yet.

    Attributes:
        done, steps: finished steps, and those of its run file.
        held_out_loss, held_out_step: of the newest evaluation, after so many steps.
        saved_step: finished steps in the newest checkpoint.
        step_s, tokens_per_s: the median of the newest steps under the present plan.
        memory_bytes: rank 0's peak of tensors, as its steps record it.
        newest_s: when its newest line of metrics or events was written, in seconds since 1970.
    """

    path: Path
    state: RunState
    model: str
    plan: str
    done: int
    steps: int
    loss: float | None
    held_out_loss: float | None
    held_out_step: int | None
    saved_step: int | None
    step_s: float | None
    predicted_step_s: float | None
    tokens_per_s: float | None
    memory_bytes: float | None
    newest_s: float


def runs_in(folder: Path) -> tuple[Path, ...]:
    """Return the run directories in a folder, or the folder itself if it is one, sorted by name."""
    if _is_run(folder):
        return (folder,)
    return tuple(sorted(path for path in folder.iterdir() if _is_run(path)))


def _is_run(path: Path) -> bool:
    return (path / "run.toml").is_file() and (path / "plan.json").is_file()


def overview(run: LiveRun) -> RunOverview:
    """Return the overview of one run, as its last look has read it.

    Raises:
        InputError: if its plan or its run file cannot be read.
    """
    file, steps = run.file, run.steps_in_all
    newest, held_out = run.steps[-NEWEST_STEPS:], run.held_out_after(0)
    since = plan_since(run.events)
    of_plan = [one for one in newest if one.step >= since]
    saved = [event for event in run.events if event.get("event") == "checkpoint"]
    return RunOverview(
        path=run.path,
        state=_state(run.path, run.events),
        model=file.plan.model,
        plan=file.plan.words,
        done=newest[-1].step + 1 if newest else 0,
        steps=steps,
        loss=_finite(newest[-1].loss) if newest else None,
        held_out_loss=held_out[-1][1] if held_out else None,
        held_out_step=held_out[-1][0] if held_out else None,
        saved_step=saved[-1].get("step") if saved else None,
        step_s=_median([one.step_s for one in of_plan]),
        predicted_step_s=None if file.prediction is None else file.prediction.step_s,
        tokens_per_s=_median([one.tokens_per_s for one in of_plan]),
        memory_bytes=_finite(newest[-1].memory_bytes) if newest else None,
        newest_s=max([*(one.time_s for one in newest), *map(_time_of, run.events)], default=0.0),
    )


def look_at(path: Path) -> RunOverview:
    """Return the overview of a run directory as it is now.

    Raises:
        InputError: if its plan or its run file cannot be read.
    """
    run = LiveRun(path)
    run.look()
    return overview(run)


def _time_of(event: Mapping[str, Any]) -> float:
    time_s = event.get("time_s", 0.0)
    return float(time_s)


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return median(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _state(path: Path, events: Sequence[dict[str, Any]]) -> RunState:
    if is_running(path):
        return RunState.RUNNING
    # A line by another hand may be JSON and no event.
    told = [event.get("event") for event in events]
    ended = [one for one in told if one in ("started", "resumed", "stopped", "finished")]
    if not ended:
        # A rank that has failed before the first event leaves its log.
        begun = any(logs_folder(path).glob("rank-*.log"))
        return RunState.BROKEN_OFF if begun else RunState.PREPARED
    return {"finished": RunState.FINISHED, "stopped": RunState.STOPPED}.get(ended[-1], RunState.BROKEN_OFF)
