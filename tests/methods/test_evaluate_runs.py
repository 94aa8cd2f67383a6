"""Runs that evaluate in bubbles tell the held-out losses of runs that evaluate between steps, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import saved, text_run

from weft.training.directory.run_directory import RunDirectory

PLAN = """
[goal]
contract = "empirical"
[checkpoint]
every = 1
keep = 20
"""
BUBBLES = "[bubble]\nwork = ['evaluate']\nmost_steps = 4\n"


def run_file(folder: Path, layout: str, more: str) -> Path:
    text = text_run(folder, PLAN + more, steps=12)
    (folder / "text.txt").write_text("The sheep of the hills are counted twice. " * 8000)
    for old, new in (
        ("steps = 12", "steps = 12\nevaluate_every = 5"),
        ("global_batch = 4", "global_batch = 64"),
        ("micro_batch_size = 1", "micro_batch_size = 8"),
        ('schedule = "1f1b"\n', ""),
        ("pp = 2\ndp = 1", layout),
        ("[train]", '[cluster]\nuse = "4xv100-16gb"\n[train]'),
    ):
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{'bubbles' if more else 'between'}.toml"
    path.write_text(text)
    return path


def evaluations(directory: Path) -> dict[int, float]:
    """The held-out losses that a run tells since its last start, by step."""
    events = RunDirectory(directory).events()
    last = max(place for place, one in enumerate(events) if one["event"] in ("started", "resumed"))
    return {one["step"]: one["held_out_loss"] for one in events[last:] if "held_out_loss" in one}


@pytest.mark.tables
def test_held_out_losses_are_those_between_steps_also_after_a_stop(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    layout = 'pp = 2\ndp = 1\nloops = 2\nschedule = "breadth-first"\n'
    between, bubbles = (
        trained(worker_pool, run_file(tmp_path, layout, more), directory=tmp_path / f"run-{len(more)}")
        for more in ("", BUBBLES)
    )
    expected = evaluations(between)
    assert set(expected) == {0, 5, 10, 12}
    assert evaluations(bubbles) == expected
    # The evaluation of step 5 ends with step 9. Its weights and losses are in the checkpoints before.
    under_way = [
        step
        for step in range(1, 13)
        if any("/evaluate/weights/" in name for name in saved(bubbles, step - 1))
    ]
    assert under_way == [5, 6, 7, 8]
    plain, found = saved(between, 6), saved(bubbles, 6)
    assert all(torch.equal(one, plain[name]) for name, one in found.items() if "/evaluate/" not in name)
    for stop in (5, 7):
        for step in range(stop + 1, 13):
            shutil.rmtree(bubbles / "checkpoints" / f"step-{step:08}")
        trained(worker_pool, tmp_path / "bubbles.toml", resume=bubbles)
        assert evaluations(bubbles) == {step: loss for step, loss in expected.items() if step}
