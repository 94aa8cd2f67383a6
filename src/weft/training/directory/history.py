"""A run's earlier starts, read from its files. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from weft.training.directory.run_directory import RunDirectory

_STARTS = ("started", "resumed")


def last_plan_id(directory: RunDirectory) -> str | None:
    """Return the plan id of the run's last start, or None before its first start."""
    return _plan_at(directory.events(), float("inf"))


def plan_since(directory: RunDirectory) -> int:
    """Return the first step under the plan of the run's last start."""
    changes = [event["step"] for event in directory.events() if event["event"] == "plan changed"]
    return int(changes[-1]) if changes else 0


def recorded_loss(directory: RunDirectory, step: int, plan_ids: Collection[str]) -> float | None:
    """Return the last recorded loss of a step; None if there is none, or another plan trained the step.

    `plan_ids` are all ids of the plan, also the ids from earlier versions of weft.
    """
    for row in directory.metrics():
        if row["step"] == step and _plan_at(directory.events(), row["time_s"]) in plan_ids:
            return float(row["loss"])
    return None


def checkpoint_times(directory: RunDirectory) -> dict[str, float]:
    """Return the number of checkpoints of all starts, with their total seconds of stall and of writing."""
    saved = [event for event in directory.events() if event["event"] == "checkpoint"]
    return {
        "checkpoints": len(saved),
        "checkpoint_stall_s": sum(event["stall_s"] for event in saved),
        "checkpoint_write_s": sum(event["write_s"] for event in saved),
    }


def warnings(directory: RunDirectory, since_s: float) -> list[str]:
    """Return the warnings to the user from the events since `since_s`, one line each."""
    texts = {
        "checkpoint skipped": "skipped a checkpoint: {reason}",
        "data warning": "{warning}",
        "hang": "{problem}",
        "hang over": "goes on after {after_s:.0f} s",
        "began anew": "step {step}: what each rank kept to itself under plan {former} is left behind; all "
        "replicas go on from their average",
        "resume differs": "step {step} has the loss {loss} after resuming; before, it was {recorded}",
    }
    return [
        texts[event["event"]].format(**event)
        for event in directory.events()
        if event["event"] in texts and event["time_s"] >= since_s
    ]


def _plan_at(events: Sequence[dict[str, Any]], time_s: float) -> str | None:
    """Return the plan of the last start before a moment."""
    found = [
        event.get("plan_id") for event in events if event["event"] in _STARTS and event["time_s"] <= time_s
    ]
    return found[-1] if found else None
