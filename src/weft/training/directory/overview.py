"""Runs at a glance: the state and the newest figures of each run directory in a folder. It only reads."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from weft.describe.plan_file import load_plan_file
from weft.errors import InputError
from weft.training.directory.run_directory import RunDirectory
from weft.training.directory.run_lock import is_running

# Steps whose median tells the speed of a run.
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
        held_out_loss: of the newest evaluation.
        step_s, tokens_per_s: the median of the newest steps.
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
    step_s: float | None
    predicted_step_s: float | None
    tokens_per_s: float | None
    newest_s: float


def runs_in(folder: Path) -> tuple[Path, ...]:
    """Return the run directories in a folder, or the folder itself if it is one, sorted by name."""
    if _is_run(folder):
        return (folder,)
    return tuple(sorted(path for path in folder.iterdir() if _is_run(path)))


def _is_run(path: Path) -> bool:
    return (path / "run.toml").is_file() and (path / "plan.json").is_file()


def overview(path: Path) -> RunOverview:
    """Return the overview of one run.

    Raises:
        InputError: if its plan or its run file cannot be read.
    """
    directory, file = RunDirectory(path), load_plan_file(path / "plan.json")
    try:
        steps = int(tomllib.loads((path / "run.toml").read_text(encoding="utf-8"))["train"]["steps"])
    except (tomllib.TOMLDecodeError, KeyError, ValueError) as error:
        raise InputError(f"{path / 'run.toml'}: no steps can be read from it: {error}") from None
    rows, events, held_out = directory.metrics(), directory.events(), directory.held_out()
    newest = rows[-NEWEST_STEPS:]
    return RunOverview(
        path=path,
        state=_state(path, events),
        model=file.plan.model,
        plan=file.plan.words,
        done=int(rows[-1]["step"]) + 1 if rows else 0,
        steps=steps,
        loss=rows[-1]["loss"] if rows else None,
        held_out_loss=held_out[-1]["held_out_loss"] if held_out else None,
        step_s=_median(newest, "step_s"),
        predicted_step_s=None if file.prediction is None else file.prediction.step_s,
        tokens_per_s=_median(newest, "tokens_per_s"),
        newest_s=max((record.get("time_s", 0.0) for record in (*newest, *events)), default=0.0),
    )


def _median(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return median(row[name] for row in rows) if rows else None


def _state(path: Path, events: Sequence[dict[str, Any]]) -> RunState:
    if is_running(path):
        return RunState.RUNNING
    # A line by another hand may be JSON and no event.
    told = [event.get("event") for event in events]
    ended = [one for one in told if one in ("started", "resumed", "stopped", "finished")]
    if not ended:
        return RunState.PREPARED
    return {"finished": RunState.FINISHED, "stopped": RunState.STOPPED}.get(ended[-1], RunState.BROKEN_OFF)
