"""What the files of a run say about its earlier starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.training.directory.event_words import warnings
from weft.training.directory.run_directory import (
    RunDirectory,
    checkpoint_figures,
    last_plan_id,
    plan_since,
    recorded_loss,
)


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def row(step: int, loss: float, time_s: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "time_s": time_s}


def event(name: str, time_s: float, **details: Any) -> dict[str, Any]:
    return {"time_s": time_s, "event": name, **details}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Plan a trained steps 0 to 2, plan b went on at step 1 and was killed in step 2."""
    (tmp_path / "events.jsonl").write_text(
        lines(
            [
                event("started", 0.0, step=0, plan_id="a"),
                event("checkpoint", 2.0, step=1, stall_s=0.25, write_s=1.0, bytes=70),
                event("plan changed", 4.5, step=1, former="a", now="b"),
                event("resumed", 5.0, step=1, plan_id="b"),
                event("checkpoint", 6.0, step=2, stall_s=0.5, write_s=2.0, bytes=80),
            ]
        )
        + '{"event": "torn'
    )
    rows = [row(0, 3.0, 1.0), row(1, 2.5, 2.5), row(2, 2.0, 3.0), row(1, 2.25, 5.5)]
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    return RunDirectory(tmp_path)


def test_a_loss_counts_where_the_same_plan_recorded_it_last(directory: RunDirectory) -> None:
    found = {(step, plan): recorded_loss(directory, step, [plan]) for step in range(4) for plan in ("a", "b")}
    known = {key: loss for key, loss in found.items() if loss is not None}
    assert known == {(0, "a"): 3.0, (1, "b"): 2.25, (2, "a"): 2.0}
    assert recorded_loss(directory, 2, ["a", "b"]) == 2.0


def test_starts_and_checkpoints_are_counted(directory: RunDirectory) -> None:
    assert last_plan_id(directory) == "b"
    assert plan_since(directory.events()) == 1
    assert checkpoint_figures(directory) == {
        "checkpoints": 2,
        "checkpoint_bytes": 80,
        "checkpoint_stall_s": 0.75,
        "checkpoint_write_s": 3.0,
    }


def test_a_run_without_files_has_no_history(tmp_path: Path) -> None:
    fresh = RunDirectory(tmp_path)
    assert last_plan_id(fresh) is None
    assert plan_since(fresh.events()) == 0
    assert recorded_loss(fresh, 0, ["a"]) is None
    assert checkpoint_figures(fresh)["checkpoints"] == 0
    assert warnings(fresh.events(), 0.0) == []


def test_warnings_are_those_of_this_start_in_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        lines(
            [
                event("checkpoint skipped", 1.0, reason="old"),
                event("checkpoint skipped", 2.0, reason="torn"),
                event("started", 2.5, step=0, plan_id="a"),
                event("data warning", 2.5, step=0, warning="2 documents"),
                event("resume differs", 3.0, step=4, loss=2.5, recorded=2.0),
            ]
        )
    )
    assert warnings(RunDirectory(tmp_path).events(), 2.0) == [
        "skipped a checkpoint: torn",
        "2 documents",
        "step 4 has the loss 2.5 after resuming; before, it was 2.0",
    ]
