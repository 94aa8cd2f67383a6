"""Runs that evaluate in bubbles tell the held-out losses of runs that evaluate between steps, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import saved, text_run

from weft.training.directory.run_directory import RunDirectory

PLAN = """
[goal]
contract = "empirical"
[checkpoint]
every = 3
keep = 9
"""
BUBBLES = "[bubble]\nwork = ['evaluate']\nmost_steps = 4\n"


def run_file(folder: Path, more: str = "") -> str:
    text = text_run(folder, PLAN + more, steps=12)
    return text.replace("steps = 12", "steps = 12\nevaluate_every = 5").replace(
        "global_batch = 4", "global_batch = 64"
    )


def evaluations(directory: Path) -> dict[int, dict[str, Any]]:
    """What a run tells of each evaluation, by its step."""
    events = RunDirectory(directory).events()
    told = ("event", "step", "held_out_loss")
    return {
        one["step"]: {name: one[name] for name in told}
        for one in events
        if one["event"] in ("started", "evaluated", "finished")
    }


@pytest.mark.parametrize("layout", ["pp = 2\ndp = 1", "pp = 2\ndp = 2", "pp = 2\ndp = 1\nloops = 2"])
def test_held_out_losses_are_those_between_steps_also_after_a_stop(
    worker_pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    order = "breadth-first" if "loops" in layout else "1f1b"
    directories = {}
    for name, more in (("between", ""), ("bubbles", BUBBLES), ("stopped", BUBBLES)):
        source, directories[name] = tmp_path / f"{name}.toml", tmp_path / name
        text = run_file(tmp_path, more).replace("pp = 2\ndp = 1", layout)
        text = text.replace('"1f1b"', f'"{order}"').replace("micro_batch_size = 1", "micro_batch_size = 16")
        source.write_text(text)
        steps = 7 if name == "stopped" else None
        trained(worker_pool, source, directory=directories[name], steps=steps)
    # It stops while an evaluation of step 5 is under way.
    assert set(evaluations(directories["stopped"])) == {0, 7}
    trained(worker_pool, tmp_path / "stopped.toml", resume=directories["stopped"])
    expected = evaluations(directories["between"])
    assert set(expected) == {0, 5, 10, 12}
    assert evaluations(directories["bubbles"]) == expected
    found = evaluations(directories["stopped"])
    assert {step: found[step] for step in expected} == expected
    # The evaluation of step 5 ends with step 9, and its weights and losses are in the checkpoint before.
    under_way = [len([name for name in saved(directories["bubbles"], at) if "evaluate" in name]) for at in range(4)]
    assert [bool(count) for count in under_way] == [False, True, False, False]
